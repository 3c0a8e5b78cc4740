package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// Cache lists the parameters in the memory of nodes, loads and evicts them.
func Cache(ctx context.Context, args []string, out io.Writer) error {
	verbs := []string{"list", "warm", "evict"}
	if len(args) == 0 || !slices.Contains(verbs, args[0]) {
		return fmt.Errorf("cache: got %q, want one of: list, warm FUNCTION, evict FUNCTION|DIGEST", args)
	}
	fs := flag.NewFlagSet("cache "+args[0], flag.ContinueOnError)
	flags := newAPIFlags(fs)
	asJSON := console.JSONFlag(fs)
	name := fs.String("node", "", "on this node alone")
	rest, err := console.ParseMixed(fs, args[1:])
	if err != nil {
		return err
	}
	api, err := flags.open("")
	if err != nil {
		return err
	}
	switch {
	case args[0] == "list" && len(rest) == 0:
		return listCache(ctx, api, flags.namespace, *name, *asJSON, out)
	case args[0] != "list" && len(rest) == 1:
		o := schema.CacheOrder{Function: rest[0], Namespace: flags.namespace, Node: *name}
		if args[0] == "evict" && len(rest[0]) >= shortDigest && schema.IsDigest(rest[0]) {
			o.Function, o.Digest = "", rest[0]
		}
		return changeCache(ctx, api, args[0], o, *asJSON, out)
	}
	want := map[string]string{"list": "flags alone", "warm": "one FUNCTION", "evict": "one FUNCTION, or the DIGEST of its image"}
	return fmt.Errorf("cache %s: got %q, want %s", args[0], rest, want[args[0]])
}

func listCache(ctx context.Context, api *client.Client, namespace, name string, asJSON bool, out io.Writer) error {
	all := []schema.Cached{}
	if err := api.Get(ctx, "/system/cache?"+url.Values{"node": {name}, "namespace": {namespace}}.Encode(), &all); err != nil {
		return err
	}
	if asJSON {
		return json.NewEncoder(out).Encode(all)
	}
	t := console.NewTable(out)
	fmt.Fprintln(t, "NODE\tFUNCTION\t"+zygoteHead)
	for _, c := range all {
		fmt.Fprint(t, c.Node+"\t")
		zygoteRow(t, c.Zygote, time.Now())
	}
	return t.Flush()
}

func changeCache(ctx context.Context, api *client.Client, verb string, o schema.CacheOrder, asJSON bool, out io.Writer) error {
	b, err := json.Marshal(o)
	if err != nil {
		return err
	}
	a, err := api.Do(ctx, http.MethodPost, "/system/cache/"+verb, "application/json", b)
	if err != nil {
		return err
	}
	if a.Status != http.StatusOK {
		return a.Unexpected("cache " + verb)
	}
	if asJSON {
		_, err = io.Copy(out, bytes.NewReader(a.Body))
		return err
	}
	var done []schema.CacheDone
	if err := json.Unmarshal(a.Body, &done); err != nil {
		return fmt.Errorf("cache %s: %w", verb, err)
	}
	what := map[string]string{"warm": "in memory", "evict": "freed"}[verb]
	for _, d := range done {
		fmt.Fprintf(out, "%s: %s %s\n", console.Harmless(d.Node), plan.Size(d.Bytes), what)
	}
	return nil
}
