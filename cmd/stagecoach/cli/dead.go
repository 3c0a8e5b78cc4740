package cli

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// Dead lists, shows, redrives and drops dead letters.
func Dead(ctx context.Context, args []string, out io.Writer) error {
	verbs := []string{"list", "show", "redrive", "drop"}
	if len(args) == 0 || !slices.Contains(verbs, args[0]) {
		return fmt.Errorf("dead: got %q, want one of: list, show ID, redrive ID, drop ID", args)
	}
	fs := flag.NewFlagSet("dead "+args[0], flag.ContinueOnError)
	flags := newAPIFlags(fs)
	asJSON := console.JSONFlag(fs)
	function := fs.String("function", "", "of this function or pipeline alone; with redrive and drop: all of its")
	body := fs.Bool("body", false, "show: print the body instead")
	rest, err := console.ParseMixed(fs, args[1:])
	if err != nil {
		return err
	}
	api, err := flags.open("")
	if err != nil {
		return err
	}
	q := url.Values{}
	if *function != "" {
		q.Set("function", *function)
	}
	if flags.namespace != "" {
		q.Set("namespace", flags.namespace)
	}
	id := strings.Join(rest, " ") // the switch below accepts one name at most
	switch {
	case args[0] == "list" && len(rest) == 0:
		return listDead(ctx, api, q, *asJSON, out)
	case args[0] == "show" && len(rest) == 1:
		return showDead(ctx, api, id, *body, *asJSON, out)
	case (args[0] == "redrive" || args[0] == "drop") && (len(rest) == 1) != (*function != ""):
		return changeDead(ctx, api, args[0], id, q, *asJSON, out)
	}
	return fmt.Errorf("dead %s: got %q, want an ID, or --function NAME for all of its (list takes no ID)", args[0], rest)
}

func listDead(ctx context.Context, api *client.Client, q url.Values, asJSON bool, out io.Writer) error {
	all := schema.DeadPage{Letters: []schema.DeadLetter{}}
	for {
		var page schema.DeadPage
		if err := api.Get(ctx, "/system/dead?"+q.Encode(), &page); err != nil {
			return err
		}
		all.Letters = append(all.Letters, page.Letters...)
		if page.Next == "" {
			break
		}
		q.Set("after", page.Next)
	}
	if asJSON {
		return json.NewEncoder(out).Encode(all.Letters)
	}
	t := console.NewTable(out)
	fmt.Fprintln(t, "ID\tFUNCTION\tNAMESPACE\tKIND\tATTEMPTS\tDIED\tBYTES\tCAUSE")
	for _, l := range all.Letters {
		cause := []rune(l.Cause)
		if len(cause) > 80 {
			cause = append(cause[:79], '…')
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%d\t%s\t%d\t%s\n", l.ID, l.Function, l.Namespace, l.Kind, l.Attempts, l.Died.Format(time.RFC3339), l.Bytes, string(cause))
	}
	return t.Flush()
}

func showDead(ctx context.Context, api *client.Client, id string, body, asJSON bool, out io.Writer) error {
	path := "/system/dead/" + url.PathEscape(id)
	if body {
		a, err := api.Do(ctx, http.MethodGet, path+"?body=1", "", nil)
		if err == nil && a.Status != http.StatusOK {
			err = a.Unexpected("dead show " + id)
		}
		if err == nil {
			_, err = out.Write(a.Body)
		}
		return err
	}
	var l schema.DeadLetter
	if err := api.Get(ctx, path, &l); err != nil {
		return err
	}
	if asJSON {
		return json.NewEncoder(out).Encode(l)
	}
	t := console.NewTable(out)
	fmt.Fprintf(t, "ID:\t%s\nCall:\t%s\nFunction:\t%s.%s\nKind:\t%s\nCause:\t%s\nAttempts:\t%d\nAccepted:\t%s\nDied:\t%s\nBytes:\t%d\n",
		l.ID, l.CallID, l.Function, l.Namespace, l.Kind, l.Cause, l.Attempts, l.Accepted.Format(time.RFC3339), l.Died.Format(time.RFC3339), l.Bytes)
	for _, f := range [][2]string{{"Dropped", l.Dropped}, {"Callback", l.Callback}, {"Request", l.Request}} {
		if f[1] != "" {
			fmt.Fprintf(t, "%s:\t%s\n", f[0], f[1])
		}
	}
	if l.Status != 0 {
		fmt.Fprintf(t, "Status:\t%d\n", l.Status)
	}
	names := make([]string, 0, len(l.Header))
	for name := range l.Header {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(t, "Header:\t%s: %s\n", name, strings.Join(l.Header[name], ", "))
	}
	return t.Flush()
}

func changeDead(ctx context.Context, api *client.Client, verb, id string, q url.Values, asJSON bool, out io.Writer) error {
	method, path := http.MethodDelete, "/system/dead"
	if id != "" {
		path += "/" + url.PathEscape(id)
	}
	if verb == "redrive" {
		method, path = http.MethodPost, path+"/redrive"
	}
	a, err := api.Do(ctx, method, path+"?"+q.Encode(), "", nil)
	if err != nil {
		return err
	}
	if a.Status != http.StatusOK {
		return a.Unexpected("dead " + verb)
	}
	var done schema.DeadDone
	if err := json.Unmarshal(a.Body, &done); err != nil {
		return errors.Join(errors.New("dead "+verb), err)
	}
	if asJSON {
		_, err = out.Write(a.Body)
		return err
	}
	_, err = fmt.Fprintf(out, "%s: %d\n", map[string]string{"redrive": "redriven", "drop": "dropped"}[verb], done.Letters)
	return err
}
