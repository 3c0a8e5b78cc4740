package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

func runList(ctx context.Context, args []string, out io.Writer) error {
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

// cut returns text, shortened to at most most characters.
func cut(text string, most int) string {
	if all := []rune(text); len(all) > most {
		return string(all[:most-1]) + "…"
	}
	return text
}

func runDescribe(ctx context.Context, args []string, out io.Writer) error {
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
	fmt.Fprintf(t, "Replicas:\t%d, %d ready\n", f.Replicas, f.AvailableReplicas)
	if all := d.Annotations[provider.ReplicasAnnotation]; all != "" {
		fmt.Fprintf(t, "\t%s\n", strings.ReplaceAll(all, "; ", "\n\t")) // a line each
	}
	if why := d.Annotations[provider.StatusAnnotation]; why != "" {
		fmt.Fprintf(t, "Status:\t%s\n", why)
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

func runScale(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("scale", flag.ContinueOnError)
	api := newAPIFlags(fs)
	rest, err := console.ParseMixed(fs, args)
	if err != nil {
		return err
	}
	if len(rest) != 2 {
		return fmt.Errorf("scale: got %q, want NAME REPLICAS", rest)
	}
	n, err := strconv.ParseUint(rest[1], 10, 31)
	if err != nil {
		return fmt.Errorf("scale: %q, want a number of replicas", rest[1])
	}
	c, err := api.open("")
	if err != nil {
		return err
	}
	body := struct {
		Name      string `json:"serviceName"`
		Replicas  uint64 `json:"replicas"`
		Namespace string `json:"namespace,omitempty"`
	}{rest[0], n, api.namespace}
	if err := c.Send(ctx, "scale "+rest[0], http.MethodPost, "/system/scale-function/"+url.PathEscape(rest[0])+api.query(), body); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "%s: %d replicas wanted\n", rest[0], n)
	return err
}

func runLogs(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("logs", flag.ContinueOnError)
	api := newAPIFlags(fs)
	follow := fs.Bool("f", false, "go on with what comes, until interrupted")
	fs.BoolVar(follow, "follow", false, "long for -f")
	tail := fs.Int("tail", -1, "at most so many lines of before; -1: all that are kept")
	since := fs.Duration("since", 0, "no older than this, such as 10m")
	asJSON := fs.Bool("json", false, "print each line as JSON, as the API gives it")
	name, err := console.OneName(fs, args)
	if err != nil {
		return err
	}
	c, err := api.open("")
	if err != nil {
		return err
	}
	q := url.Values{"name": {name}, "tail": {strconv.Itoa(*tail)}, "follow": {strconv.FormatBool(*follow)}}
	if api.namespace != "" {
		q.Set("namespace", api.namespace)
	}
	if *since > 0 {
		q.Set("since", time.Now().Add(-*since).Format(time.RFC3339))
	}
	resp, err := c.Stream(ctx, http.MethodGet, "/system/logs?"+q.Encode(), nil, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := client.Refused(resp, "logs "+name); err != nil {
		return err
	}
	if *asJSON {
		_, err = io.Copy(out, resp.Body)
	} else {
		err = client.PrintLogs(resp.Body, out)
	}
	if *follow && ctx.Err() != nil {
		return nil // that is how it ends
	}
	return err
}

func runInvoke(ctx context.Context, args []string, out io.Writer) error {
	return invoke(ctx, args, os.Stdin, out)
}

func invoke(ctx context.Context, args []string, in io.Reader, out io.Writer) error {
	fs := flag.NewFlagSet("invoke", flag.ContinueOnError)
	api := newAPIFlags(fs)
	method := fs.String("m", http.MethodPost, "HTTP method")
	async := fs.Bool("async", false, "do not wait for the answer: print the call's id")
	var headers, query console.Repeated
	fs.Var(&headers, "header", "NAME=VALUE or NAME: VALUE; may be repeated")
	fs.Var(&query, "query", "NAME=VALUE; may be repeated")
	name, err := console.OneName(fs, args)
	if err != nil {
		return err
	}
	header := http.Header{"Content-Type": {"text/plain"}}
	for _, h := range headers {
		i := strings.IndexAny(h, "=:")
		if i <= 0 {
			return fmt.Errorf("invoke: --header %q, want NAME=VALUE", h)
		}
		header.Set(strings.TrimSpace(h[:i]), strings.TrimSpace(h[i+1:]))
	}
	values := url.Values{}
	for _, q := range query {
		k, v, _ := strings.Cut(q, "=")
		values.Add(k, v)
	}
	c, err := api.open("")
	if err != nil {
		return err
	}
	path := "/function/"
	if *async {
		path = "/async-function/"
	}
	name, rest, slash := strings.Cut(name, "/")
	name = invocationName(name, api.namespace)
	if slash {
		name += "/" + rest
	}
	path += (&url.URL{Path: name}).EscapedPath()
	if len(values) > 0 {
		path += "?" + values.Encode()
	}
	if f, ok := in.(*os.File); ok {
		if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err == nil {
			console.Progress("invoke: reading the request from the terminal, until Ctrl-D")
		}
	}
	resp, err := c.Stream(ctx, *method, path, header, io.NopCloser(in))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := client.Refused(resp, "invoke "+name); err != nil {
		return err
	}
	if *async {
		_, err = fmt.Fprintln(out, resp.Header.Get("X-Call-Id"))
		return err
	}
	_, err = io.Copy(out, resp.Body)
	return err
}
