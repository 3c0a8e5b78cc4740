package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/outside"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// runCluster is `stagecoach cluster`.
func runCluster(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		args = []string{""}
	}
	verb, rest := args[0], args[1:]
	var f clusterFlags
	do := map[string]func(context.Context, io.Writer) error{"backup": f.backup, "restore": f.restore}[verb]
	switch {
	case verb == "init":
		return initCluster(rest, out)
	case do == nil:
		return fmt.Errorf("cluster: got %q, want init, backup or restore", verb)
	}
	if err := f.parse(verb, rest); err != nil {
		return err
	}
	if err := do(ctx, out); err != nil {
		return fmt.Errorf("cluster %s: %w", verb, err)
	}
	return nil
}

// initFlags are the flags of `stagecoach cluster init`.
type initFlags struct{ dir, list, key, server, monitor string }

// parse reads the flags, and the list of servers.
func (f *initFlags) parse(args []string) ([]queue.OutsideServer, error) {
	fs := flag.NewFlagSet("cluster init", flag.ContinueOnError)
	fs.StringVar(&f.dir, "dir", "stagecoach-cluster", "folder for the files; if it has a cluster key, that one is used")
	fs.StringVar(&f.list, "servers", "", "NATS servers, with commas between: HOST, HOST:PORT or HOST:PORT/ROUTEPORT; required")
	fs.StringVar(&f.server, "server", "", "host of one of the servers: write its files alone, into the folder itself; needs --cluster-key")
	fs.StringVar(&f.key, "cluster-key", "", "file with the cluster key for --server, in place of the one in the folder")
	fs.StringVar(&f.monitor, "monitor", "", "host:port where each server answers GET /healthz; default 127.0.0.1, and the port for clients plus 4000")
	if err := console.ParseFlags(fs, args); err != nil {
		return nil, err
	}
	switch {
	case f.list == "":
		return nil, errors.New("cluster init: no --servers, want the hosts of NATS servers, such as a,b,c")
	case (f.server == "") != (f.key == ""):
		return nil, errors.New("cluster init: --server and --cluster-key belong together")
	}
	if _, port, err := net.SplitHostPort(f.monitor); f.monitor != "" && (err != nil || port == "") {
		return nil, fmt.Errorf("cluster init: --monitor: %q, want host:port, such as 0.0.0.0:8222", f.monitor)
	}
	servers, err := queue.ParseOutside(f.list)
	if err != nil {
		return nil, fmt.Errorf("cluster init: --%w", err)
	}
	for i := range servers {
		servers[i].Monitor = f.monitor
	}
	return servers, nil
}

// initCluster is `stagecoach cluster init`.
func initCluster(args []string, out io.Writer) error {
	var f initFlags
	servers, err := f.parse(args)
	if err != nil {
		return err
	}
	if f.server != "" {
		if err := outside.InitServer(f.dir, f.key, f.server, servers, time.Now()); err != nil {
			return fmt.Errorf("cluster init: %w", err)
		}
		fmt.Fprintf(out, "%s: start nats-server -c %s in it\n", f.dir, queue.OutsideConfig)
		return nil
	}
	if err := outside.Init(f.dir, servers, time.Now()); err != nil {
		return fmt.Errorf("cluster init: %w", err)
	}
	var urls []string
	for _, s := range servers {
		fmt.Fprintf(out, "%s: copy it to %s, and start nats-server -c %s in it\n", filepath.Join(f.dir, s.Name), s.Host, queue.OutsideConfig)
		urls = append(urls, s.URL())
	}
	fmt.Fprintf(out, "%s: copy it to each control plane, and start stagecoach up --cluster-key %s --nats %s\n", filepath.Join(f.dir, outside.KeyFile), outside.KeyFile, strings.Join(urls, ","))
	if len(servers) < 3 {
		fmt.Fprintf(os.Stderr, "%d servers keep one copy of each stream; three keep three, and outlive the loss of one\n", len(servers))
	}
	return nil
}
