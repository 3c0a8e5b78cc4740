package cli

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// List prints the deployed functions.
func List(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("list", flag.ContinueOnError)
	api := newAPIFlags(fs)
	asJSON := console.JSONFlag(fs)
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	c, err := api.open("")
	if err != nil {
		return err
	}
	var all []client.FunctionStatus
	if err := c.Get(ctx, "/system/functions"+api.query(), &all); err != nil {
		return err
	}
	slices.SortFunc(all, func(a, b client.FunctionStatus) int { return strings.Compare(a.Name, b.Name) })
	if *asJSON {
		return json.NewEncoder(out).Encode(append([]client.FunctionStatus{}, all...)) // [] and not null
	}
	t := console.NewTable(out)
	fmt.Fprintln(t, "FUNCTION\tIMAGE\tINVOCATIONS\tREPLICAS\tSTATUS")
	for i := range all {
		f := &all[i]
		fmt.Fprintf(t, "%s\t%s\t%.0f\t%d/%d\t%s\n", f.Name, f.Image, f.InvocationCount, f.AvailableReplicas, f.Replicas, cut(f.Status(), statusWidth))
	}
	return t.Flush()
}

// statusWidth is how many characters of a status list shows; describe shows all of it.
const statusWidth = 120

// cut shortens a text to the given number of characters, if it is longer.
func cut(text string, most int) string {
	if all := []rune(text); len(all) > most {
		return string(all[:most-1]) + "…"
	}
	return text
}
