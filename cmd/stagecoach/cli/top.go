package cli

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// Top shows a running gateway, live in a terminal.
func Top(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("top", flag.ContinueOnError)
	gateway := gatewayFlag(fs)
	once := fs.Bool("once", false, "print it once and end, as when the output is no terminal")
	asJSON := fs.Bool("json", false, "print what GET /system/top answers, once")
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	api, err := client.Dial(*gateway)
	if err != nil {
		return err
	}
	api.HTTP.Timeout = 5 * time.Second
	var v schema.Top
	if err := api.Get(ctx, "/system/top", &v); err != nil {
		return err
	}
	if *asJSON {
		e := json.NewEncoder(out)
		e.SetIndent("", "  ")
		return e.Encode(v)
	}
	tty := openTerminal(out)
	if *once || tty == nil {
		const width = 120
		_, err := fmt.Fprintln(out, strings.Join(renderTop(v, width, 1000), "\n"))
		return err
	}
	return liveTop(ctx, api, v, tty)
}

// liveTop redraws once a second, and when the size of the terminal changes, until ctx ends or
// somebody types q.
func liveTop(ctx context.Context, api *client.Client, v schema.Top, tty *terminal) error {
	restore, err := tty.raw()
	if err != nil {
		return err
	}
	defer restore()
	ctx, quit := context.WithCancel(ctx)
	keys := make(chan struct{})
	go func() { defer close(keys); tty.keys(ctx, quit) }()
	defer func() { quit(); <-keys }()
	resized := make(chan os.Signal, 1)
	signal.Notify(resized, syscall.SIGWINCH)
	defer signal.Stop(resized)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var failed error
	for {
		width, height := tty.size()
		lines := renderTop(v, width, height)
		if failed != nil {
			lines[0] = fit("no answer, what is below is old: "+printable(failed.Error()), width)
		}
		if err := tty.draw(lines); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-resized:
			continue
		case <-tick.C:
		}
		var next schema.Top
		if failed = api.Get(ctx, "/system/top", &next); failed == nil {
			v = next
		}
	}
}
