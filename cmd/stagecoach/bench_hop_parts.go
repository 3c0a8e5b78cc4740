package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/console"
)

// benchEcho is `bench echo`: a bare server that other cases are compared with.
func benchEcho(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench echo", flag.ContinueOnError)
	listen := fs.String("listen", "127.0.0.1:0", "host:port")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%shttp://%s\n", child.Listening, l.Addr())
	return bench.Echo(ctx, l)
}

// benchLoad is `bench load`: a process that sends the load of a case.
func benchLoad(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("bench load", flag.ContinueOnError)
	addr := fs.String("addr", "", "host:port")
	path := fs.String("path", "/function/noop", "")
	c := fs.Int("c", 1, "connections")
	d := fs.Duration("duration", time.Second, "")
	client := fs.String("client", string(bench.NetHTTP), "net/http or lean")
	size := fs.Int("size", 64, "bytes of the body")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	body := make([]byte, *size)
	for i := range body {
		body[i] = 'a' + byte(i%26)
	}
	r, err := bench.Load(ctx, bench.Client(*client), *addr, *path, *c, *d, body)
	if err != nil {
		return err
	}
	return json.NewEncoder(out).Encode(r)
}
