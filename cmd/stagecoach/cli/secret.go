package cli

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"

	"github.com/stagecoach-serving/stagecoach/internal/console"
)

// Secret creates, updates, lists and removes secrets.
func Secret(ctx context.Context, args []string, out io.Writer) error {
	return secretCommand(ctx, args, os.Stdin, out)
}

// secretCommand creates, updates, lists or removes secrets. A value comes from a file, from the
// command line, or from in.
func secretCommand(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	methods := map[string]string{"create": http.MethodPost, "update": http.MethodPut, "remove": http.MethodDelete, "list": http.MethodGet}
	if len(args) == 0 || methods[args[0]] == "" {
		return fmt.Errorf("secret: got %q, want create NAME, update NAME, list or remove NAME", args)
	}
	verb := args[0]
	fs := flag.NewFlagSet("secret "+verb, flag.ContinueOnError)
	api := newAPIFlags(fs)
	literal, file := new(string), new(string)
	if verb == "create" || verb == "update" {
		literal = fs.String("from-literal", "", "the value; others on this machine may see it in the list of processes")
		file = fs.String("from-file", "", "a file with the value; default: standard input")
	}
	if verb == "list" {
		return listSecrets(ctx, fs, api, args[1:], out)
	}
	name, err := console.OneName(fs, args[1:])
	if err != nil {
		return err
	}
	// faas-provider's form: rawValue is base64 in JSON, and so may hold any bytes.
	body := struct {
		Name      string `json:"name"`
		Namespace string `json:"namespace,omitempty"`
		Value     string `json:"value,omitempty"`
		RawValue  []byte `json:"rawValue,omitempty"`
	}{Name: name, Namespace: api.namespace}
	switch {
	case verb == "remove":
	case *literal != "" && *file != "":
		return fmt.Errorf("secret %s: got --from-literal and --from-file, want one", verb)
	case *literal != "":
		body.RawValue = []byte(*literal)
	case *file != "":
		body.RawValue, err = os.ReadFile(*file)
	default:
		body.RawValue, err = io.ReadAll(in)
	}
	if err != nil {
		return fmt.Errorf("secret %s: %w", name, err)
	}
	body.Value = string(body.RawValue)
	c, err := api.open("")
	if err != nil {
		return err
	}
	if err := c.Send(ctx, "secret "+verb+" "+name, methods[verb], "/system/secrets", body); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s: %sd\n", name, verb)
	return err
}

func listSecrets(ctx context.Context, fs *flag.FlagSet, api *apiFlags, args []string, out io.Writer) error {
	asJSON := console.JSONFlag(fs)
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	c, err := api.open("")
	if err != nil {
		return err
	}
	var all []struct{ Name string }
	if err := c.Get(ctx, "/system/secrets"+api.query(), &all); err != nil {
		return err
	}
	names := make([]string, len(all))
	for i, s := range all {
		names[i] = s.Name
	}
	return printNames(names, *asJSON, out)
}
