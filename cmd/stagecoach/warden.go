package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
)

// wardenLine starts this program as a warden, also if its file was replaced since.
var wardenLine = [...]string{"/proc/self/exe", "warden"}

// wardenLinger is how long a node may be without a KeysManager before the warden ends processes
// that serve nothing.
const wardenLinger = time.Minute

// launchWarden returns a client of the warden of the node with this state folder. It starts a
// warden if there is none.
func launchWarden(ctx context.Context, state string, r RuntimeConfig, node string) (*warden.Client, error) {
	folder := filepath.Join(state, "warden")
	return warden.Launch(ctx, warden.Launcher{
		Socket: filepath.Join(folder, "socket"), Command: slices.Concat(wardenLine[:], r.arguments(node)), Log: filepath.Join(folder, "log"), Runs: r.String(),
	})
}

func runWarden(ctx context.Context, args []string, _ io.Writer) error {
	fs := flag.NewFlagSet("warden", flag.ContinueOnError)
	linger := fs.Duration("linger", wardenLinger, "for how long there may be no KeysManager before processes that are no use to anybody end")
	node := fs.String(nodeFlag, "", "name of the node, which no other node of the machine has")
	runs := defaultRuntime()
	runs.addFlags(fs)
	runs.pods.addFlags(fs)
	if err := console.ParseFlags(fs, args); err != nil {
		return fmt.Errorf("%w (`stagecoach keysmanager` starts it)", err)
	}
	pipes := make(chan os.Signal, 1)
	signal.Notify(pipes, syscall.SIGPIPE) // a log that nobody reads must not end the warden
	defer signal.Stop(pipes)
	f := os.NewFile(warden.ListenFD, "socket")
	l, err := net.FileListener(f)
	_ = f.Close() // the listener has its own copy
	if err != nil {
		return fmt.Errorf("warden: descriptor %d: %w, want the socket that `stagecoach keysmanager` starts it with", warden.ListenFD, err)
	}
	listener, ok := l.(*net.UnixListener)
	if !ok {
		return errors.Join(fmt.Errorf("warden: descriptor %d is a %T, want a unix socket", warden.ListenFD, l), l.Close())
	}
	log := slog.New(slog.NewJSONHandler(os.Stderr, nil))
	r, err := runs.open(ctx, *node, nil, log)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	return warden.Serve(ctx, warden.Server{Listener: listener, Runtime: r, Runs: runs.String(), Linger: *linger, Log: log})
}
