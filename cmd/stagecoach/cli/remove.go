package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Remove removes functions.
func Remove(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("remove", flag.ContinueOnError)
	file, filter := stackFlags(fs)
	api := newAPIFlags(fs)
	names, err := console.ParseMixed(fs, args)
	if err != nil {
		return err
	}
	namespaces, inStack, ofStack := map[string]string{}, "", len(names) == 0
	switch {
	case ofStack:
		f, all, err := openStack(*file, *filter)
		if err != nil {
			return err
		}
		names, inStack = all, f.Provider.Gateway
		for _, n := range names {
			// A name in a stack file has no namespace, even if it has dots.
			namespaces[n] = cmp.Or(f.Functions[n].Namespace, pipeline.DefaultNamespace)
		}
	case *file != "" || *filter != "":
		return fmt.Errorf("remove: got functions %q and -f or --filter, want one of the two", names)
	}
	c, err := api.open(inStack)
	if err != nil {
		return err
	}
	var failed []error
	for _, name := range names {
		namespace := namespaces[name]
		if api.namespace != "" {
			namespace = api.namespace
		}
		body := struct {
			Name      string `json:"functionName"`
			Namespace string `json:"namespace,omitempty"`
		}{name, namespace}
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		a, err := c.Do(ctx, http.MethodDelete, "/system/functions"+(&apiFlags{namespace: namespace}).query(), "application/json", b)
		switch {
		case err != nil:
			failed = append(failed, err)
		case a.Status == http.StatusNotFound && ofStack: // that is what the user wants
			fmt.Fprintf(out, "%s: is not deployed\n", name)
		case a.Status >= 300:
			failed = append(failed, a.Unexpected("remove "+name))
		default:
			fmt.Fprintf(out, "%s: removed\n", name)
		}
	}
	return errors.Join(failed...)
}
