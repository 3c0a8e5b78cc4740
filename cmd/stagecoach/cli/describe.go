package cli

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// Describe prints what is known of a function.
func Describe(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("describe", flag.ContinueOnError)
	api := newAPIFlags(fs)
	asJSON := fs.Bool("json", false, "print JSON, as the API gives it")
	name, err := console.OneName(fs, args)
	if err != nil {
		return err
	}
	c, err := api.open("")
	if err != nil {
		return err
	}
	q := url.Values{"usage": {"1"}}
	if api.namespace != "" {
		q.Set("namespace", api.namespace)
	}
	var raw json.RawMessage
	if err := c.Get(ctx, "/system/function/"+url.PathEscape(name)+"?"+q.Encode(), &raw); err != nil {
		return err
	}
	if *asJSON {
		_, err := fmt.Fprintln(out, string(raw))
		return err
	}
	var f client.FunctionStatus
	var d client.Deployment
	if err := errors.Join(json.Unmarshal(raw, &f), json.Unmarshal(raw, &d)); err != nil {
		return fmt.Errorf("describe %s: %w", name, err)
	}
	return describeFunction(f, d, c.Base, out)
}

func describeFunction(f client.FunctionStatus, d client.Deployment, gateway string, out io.Writer) error {
	t := console.NewTable(out)
	fmt.Fprintf(t, "Name:\t%s\nNamespace:\t%s\nImage:\t%s\n", f.Name, f.Namespace, f.Image)
	if stage := d.Annotations[pipeline.Prefix+"variant-of"]; stage != "" {
		fmt.Fprintf(t, "Variant of:\t%s\n", stage)
	}
	fmt.Fprintf(t, "Replicas:\t%d, %d ready\n", f.Replicas, f.AvailableReplicas)
	if all := d.Annotations[provider.ReplicasAnnotation]; all != "" {
		fmt.Fprintf(t, "\t%s\n", strings.ReplaceAll(all, "; ", "\n\t")) // one line per replica
	}
	if why := d.Annotations[provider.StatusAnnotation]; why != "" {
		fmt.Fprintf(t, "Status:\t%s\n", why)
	}
	if why := d.Annotations[provider.BatchAnnotation]; why != "" {
		fmt.Fprintf(t, "Batch:\t%s\n", strings.TrimPrefix(why, "batch "))
	}
	if text := d.Annotations[provider.AccuracyAnnotation]; text != "" {
		fmt.Fprintf(t, "Accuracy:\t%s\n", text)
	}
	if all := d.Annotations[provider.VariantsAnnotation]; all != "" {
		fmt.Fprintf(t, "Variants:\t%s\n", strings.ReplaceAll(all, " | ", "\n\t")) // one line per variant
	}
	if why := f.LastFailure(); why != "" {
		fmt.Fprintf(t, "Last failure:\t%s\n", strings.ReplaceAll(why, " | ", "\n\t"))
	}
	if f.Usage != nil && f.AvailableReplicas > 0 {
		fmt.Fprintf(t, "Usage:\t%.0fm CPU, %s\n", f.Usage.CPU, plan.Size(int64(f.Usage.TotalMemoryBytes)))
	}
	fmt.Fprintf(t, "Invocations:\t%.0f\nURL:\t%s/function/%s\n", f.InvocationCount, gateway, invocationName(f.Name, f.Namespace))
	if d.EnvProcess != "" {
		fmt.Fprintf(t, "Process:\t%s\n", d.EnvProcess)
	} else if guess := d.Annotations[provider.GuessAnnotation]; guess != "" {
		fmt.Fprintf(t, "Process:\tguessed %s\n", guess)
	}
	describeMap(t, "Environment", d.EnvVars)
	describeMap(t, "Labels", d.Labels)
	provider.DropAnswered(d.Annotations)
	describeMap(t, "Annotations", d.Annotations)
	if len(d.Secrets) > 0 {
		fmt.Fprintf(t, "Secrets:\t%s\n", strings.Join(d.Secrets, ", "))
	}
	describeResources(t, "Limits", d.Limits)
	describeResources(t, "Requests", d.Requests)
	return t.Flush()
}

func describeResources(w io.Writer, title string, r *client.Resources) {
	if r == nil {
		return
	}
	m := map[string]string{"cpu": r.CPU, "memory": r.Memory}
	maps.DeleteFunc(m, func(_, v string) bool { return v == "" })
	describeMap(w, title, m)
}

func describeMap(w io.Writer, title string, m map[string]string) {
	for i, k := range slices.Sorted(maps.Keys(m)) {
		if i == 0 {
			title += ":"
		} else {
			title = ""
		}
		fmt.Fprintf(w, "%s\t%s=%s\n", title, k, m[k])
	}
}
