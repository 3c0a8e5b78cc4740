package main

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/stagecoach-serving/stagecoach/cmd/stagecoach/cli"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// probeControl implements cli.Probe.
func probeControl(ctx context.Context, urls, token, name string) (cli.Control, error) {
	nc, err := queue.Connect(urls, token, "doctor "+name, slog.New(slog.DiscardHandler))
	if err != nil {
		return cli.Control{}, err
	}
	defer nc.Close()
	p, ahead, margin, err := node.Probe(ctx, queue.NewLink(nc), name)
	if last := nc.LastError(); err != nil && last != nil {
		err = fmt.Errorf("%w; %w", err, last)
	}
	return cli.Control{Version: p.Version, Ahead: ahead, Margin: margin}, err
}
