package cli

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// Namespace lists, creates and removes namespaces.
func Namespace(ctx context.Context, args []string, out io.Writer) error {
	methods := map[string]string{"list": http.MethodGet, "create": http.MethodPost, "remove": http.MethodDelete}
	if len(args) == 0 || methods[args[0]] == "" {
		return fmt.Errorf("namespace: got %q, want list, create NAME or remove NAME", args)
	}
	verb := args[0]
	fs := flag.NewFlagSet("namespace "+verb, flag.ContinueOnError)
	gateway := gatewayFlag(fs)
	if verb == "list" {
		return listNamespaces(ctx, fs, gateway, args[1:], out)
	}
	name, err := console.OneName(fs, args[1:])
	if err != nil {
		return err
	}
	c, err := client.Dial(*gateway)
	if err != nil {
		return err
	}
	body := struct {
		Name string `json:"name"`
	}{name}
	if err := c.Send(ctx, "namespace "+verb+" "+name, methods[verb], "/system/namespace/"+url.PathEscape(name), body); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s: %sd\n", name, verb)
	return err
}

func listNamespaces(ctx context.Context, fs *flag.FlagSet, gateway *string, args []string, out io.Writer) error {
	asJSON := console.JSONFlag(fs)
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	c, err := client.Dial(*gateway)
	if err != nil {
		return err
	}
	var all []string
	if err := c.Get(ctx, "/system/namespaces", &all); err != nil {
		return err
	}
	return printNames(all, *asJSON, out)
}

// printNames prints names in order, one per line, or a list in JSON.
func printNames(names []string, asJSON bool, out io.Writer) error {
	slices.Sort(names)
	if asJSON {
		return json.NewEncoder(out).Encode(append([]string{}, names...)) // [] and not null
	}
	t := console.NewTable(out)
	for _, n := range names {
		fmt.Fprintln(t, n)
	}
	return t.Flush()
}
