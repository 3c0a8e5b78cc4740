package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
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

// initCluster is `stagecoach cluster init`.
func initCluster(args []string, out io.Writer) error {
	fs := flag.NewFlagSet("cluster init", flag.ContinueOnError)
	dir := fs.String("dir", "stagecoach-cluster", "folder for the files; if it has a cluster key, that one is used")
	list := fs.String("servers", "", "NATS servers, with commas between: HOST, HOST:PORT or HOST:PORT/ROUTEPORT; required")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	if *list == "" {
		return errors.New("cluster init: no --servers, want the hosts of NATS servers, such as a,b,c")
	}
	servers, err := queue.ParseOutside(*list)
	if err != nil {
		return fmt.Errorf("cluster init: --%w", err)
	}
	if err := outside.Init(*dir, servers, time.Now()); err != nil {
		return fmt.Errorf("cluster init: %w", err)
	}
	var urls []string
	for _, s := range servers {
		fmt.Fprintf(out, "%s: copy it to %s, and start nats-server -c %s in it\n", filepath.Join(*dir, s.Name), s.Host, queue.OutsideConfig)
		urls = append(urls, s.URL())
	}
	fmt.Fprintf(out, "%s: copy it to each control plane, and start stagecoach up --cluster-key %s --nats %s\n", filepath.Join(*dir, outside.KeyFile), outside.KeyFile, strings.Join(urls, ","))
	if len(servers) < 3 {
		fmt.Fprintf(os.Stderr, "%d servers keep one copy of each stream; three keep three, and outlive the loss of one\n", len(servers))
	}
	return nil
}
