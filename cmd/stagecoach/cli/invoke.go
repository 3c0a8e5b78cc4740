package cli

import (
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// Invoke sends standard input to a function or pipeline, and prints the answer.
func Invoke(ctx context.Context, args []string, out io.Writer) error {
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
