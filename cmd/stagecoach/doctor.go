package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/stagecoach-serving/stagecoach/cmd/stagecoach/cli"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// probeControl implements cli.Probe.
func probeControl(ctx context.Context, urls, token, name string) (cli.Control, error) {
	t, err := identity.ParseToken(token)
	if err != nil {
		return cli.Control{}, err
	}
	nc, err := queue.Connect(urls, queue.Bearer(t.User, identity.NATSClient(t.CA, time.Now)), "doctor "+name, slog.New(slog.DiscardHandler))
	if err != nil {
		return cli.Control{}, err
	}
	defer nc.Close()
	p, ahead, margin, err := node.Probe(ctx, queue.NewJoinLink(nc), t.ID())
	if last := nc.LastError(); err != nil && last != nil {
		err = fmt.Errorf("%w; %w", err, last)
	}
	return cli.Control{Version: p.Version, Ahead: ahead, Margin: margin}, err
}
