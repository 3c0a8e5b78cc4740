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

func runBench(ctx context.Context, args []string, out io.Writer) error {
	benches := map[string]func(context.Context, []string, io.Writer) error{
		"coldstart":   benchColdstart,
		"autoscaler":  benchAutoscaler,
		"gpu":         benchGPU,
		"keysmanager": benchKeysManager,
		"hop":         benchHop,
		"idle":        benchIdle,
		"wake":        benchWake,
		"sim":         benchSim,
		"echo":        benchEcho, // a server that hop compares with
		"load":        benchLoad, // a process that hop takes its load from
	}
	if len(args) == 0 || benches[args[0]] == nil {
		return fmt.Errorf("bench: got %q, want one of: autoscaler, coldstart, gpu, hop, idle, keysmanager, sim, wake", args)
	}
	return benches[args[0]](ctx, args[1:], out)
}

// reportFlags adds what every benchmark takes.
func reportFlags(fs *flag.FlagSet) (asJSON *bool, images *string) {
	return fs.Bool("json", false, "print JSON instead of a table"), fs.String("images", "build/images", "the functions' images")
}

func printReport(r *bench.Report, asJSON bool, out io.Writer) error {
	if asJSON {
		return r.WriteJSON(out)
	}
	return r.WriteTable(out)
}

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
