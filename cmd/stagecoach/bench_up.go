package main

import (
	"cmp"
	"context"
	"os"

	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// onUp runs f against an `up` of its own, on a state folder of its own, which it ends.
func onUp(ctx context.Context, flags []string, f func(api *client.Client) error) error {
	state, err := os.MkdirTemp("", "stagecoach-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(state)
	up, err := child.Start(ctx, os.Stderr, append([]string{"up", "--listen", "127.0.0.1:0", "--state", state, "--log", "error"}, flags...)...)
	if err != nil {
		return err
	}
	err = f(client.New("http://" + up.Addr))
	return cmp.Or(err, up.Stop())
}
