package cli

import (
	"cmp"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/pipeline"
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
	return listFunctions(all, out)
}

// listFunctions prints functions that are sorted by name. Variants follow their stage's function,
// with indented names.
func listFunctions(all []client.FunctionStatus, out io.Writer) error {
	variantOf := map[string]string{}
	for i := range all {
		variantOf[all[i].Name] = all[i].Annotations[pipeline.Prefix+"variant-of"]
	}
	below := func(name string) string { return parent(variantOf, name) }
	slices.SortStableFunc(all, func(a, b client.FunctionStatus) int {
		return cmp.Or(strings.Compare(cmp.Or(below(a.Name), a.Name), cmp.Or(below(b.Name), b.Name)), strings.Compare(below(a.Name), below(b.Name)))
	})
	t := console.NewTable(out)
	fmt.Fprintln(t, "FUNCTION\tIMAGE\tINVOCATIONS\tREPLICAS\tSTATUS")
	for i := range all {
		f := &all[i]
		fmt.Fprintf(t, "%s\t%s\t%.0f\t%d/%d\t%s\n", indented(f.Name, below(f.Name)), f.Image, f.InvocationCount, f.AvailableReplicas, f.Replicas, cut(f.Status(), statusWidth))
	}
	return t.Flush()
}

// parent returns the function below which a table shows a variant: its stage's own function. It
// returns "" for other functions, and for variants whose stage's function is not in the table or is
// a variant. variantOf maps the names of the table's functions to their stages.
func parent(variantOf map[string]string, name string) string {
	stage := variantOf[name]
	if of, there := variantOf[stage]; !there || of != "" {
		return ""
	}
	return stage
}

// indented returns a function's name as tables show it. parent is as the function of that name
// returns it.
func indented(name, parent string) string {
	if parent == "" {
		return name
	}
	return "  " + name
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
