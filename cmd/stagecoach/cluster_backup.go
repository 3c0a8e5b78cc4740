package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/outside"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// clusterFlags has the flags of `stagecoach cluster backup` and `stagecoach cluster restore`.
type clusterFlags struct {
	keyFile string
	urls    string
	keep    bool // restore: nodes need not join again

	file string // of the backup
	keys *clusterKeys
	cfg  queue.ClusterConfig
}

// parse reads the flags, the file's name and the cluster key.
func (f *clusterFlags) parse(verb string, args []string) error {
	fs := flag.NewFlagSet("cluster "+verb, flag.ContinueOnError)
	fs.StringVar(&f.keyFile, "cluster-key", outside.KeyFile, "file with the cluster key of stagecoach cluster init")
	fs.StringVar(&f.urls, "nats", "nats://127.0.0.1:4222", "URLs of the NATS servers, with commas between")
	if verb == "restore" {
		fs.BoolVar(&f.keep, "keep-nodes", false, "let the nodes of the backup in without a new token; right only if no node was revoked since")
	}
	rest, err := console.ParseMixed(fs, args)
	if err != nil {
		return err
	}
	if f.keyFile == "" {
		return errors.New("no --cluster-key, want a file")
	}
	if len(rest) != 1 {
		return fmt.Errorf("got %q, want one FILE", rest)
	}
	f.file = rest[0]
	f.cfg = queue.ClusterConfig{URLs: strings.Split(f.urls, ","), Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))}
	if f.keys, err = (&ClusterConfig{Key: f.keyFile}).keys(); err != nil {
		return err
	}
	return f.keys.access(&f.cfg)
}

// backup is `stagecoach cluster backup`.
func (f *clusterFlags) backup(ctx context.Context, out io.Writer) error {
	nc, err := f.cfg.Dial("backup")
	if err != nil {
		return wrongKey(f.keyFile, err)
	}
	defer nc.Close()
	to, err := os.CreateTemp(filepath.Dir(f.file), filepath.Base(f.file)+".*") // mode 0600
	if err != nil {
		return err
	}
	total := int64(0)
	err = queue.Backup(ctx, nc, to, time.Now(), func(_ string, size int64) { total += size })
	if err == nil {
		err = to.Sync()
	}
	if err = errors.Join(err, to.Close()); err == nil {
		err = os.Rename(to.Name(), f.file)
	}
	if err != nil {
		return errors.Join(err, os.Remove(to.Name()))
	}
	if err := syncFolder(filepath.Dir(f.file)); err != nil {
		return err
	}
	fmt.Fprintf(out, "%s: %d bytes of streams; secrets and the cluster key are not in it\n", f.file, total)
	return nil
}

// syncFolder makes a rename in a folder outlive a crash of the machine.
func syncFolder(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// restore is `stagecoach cluster restore`.
func (f *clusterFlags) restore(ctx context.Context, out io.Writer) error {
	from, err := os.Open(f.file)
	if err != nil {
		return err
	}
	defer from.Close()
	nc, err := f.cfg.Dial("restore")
	if err != nil {
		return wrongKey(f.keyFile, err)
	}
	defer nc.Close()
	if err := noneRuns(ctx, queue.NewBus(nc)); err != nil {
		return err
	}
	total := int64(0)
	made, err := queue.Restore(ctx, nc, from, func(_ string, size int64) { total += size })
	if errors.Is(err, queue.ErrPartly) {
		return fmt.Errorf("%w; before the next attempt, empty the folder data of all servers", err)
	} else if err != nil {
		return err
	}
	nodes, err := f.restoreAuthority(ctx)
	if err != nil {
		return fmt.Errorf("the streams are restored, but the membership is not safe yet: %w; empty the folder data of all servers, and try again", err)
	}
	fmt.Fprintf(out, "%s of %s: %d bytes restored\njoin tokens of the backup are void\n", f.file, made.Local().Format(time.DateTime), total)
	if len(nodes) > 0 && f.keep {
		fmt.Fprintf(out, "these nodes may connect without a new token; revoke the nodes that were revoked after the backup: %s\n", strings.Join(nodes, ", "))
	} else if len(nodes) > 0 {
		fmt.Fprintf(out, "these nodes have to join again, with a new token: %s\n", strings.Join(nodes, ", "))
	}
	return nil
}

// noneRuns returns an error if a control plane runs.
func noneRuns(ctx context.Context, bus *queue.Bus) error {
	heard := make(chan struct{}, 1)
	stop, err := bus.Hear(announceName, func([]byte) {
		select {
		case heard <- struct{}{}:
		default:
		}
	})
	if err != nil {
		return err
	}
	defer stop()
	select {
	case <-heard:
		return errors.New("a control plane runs; stop all of them first")
	case <-time.After(5 * announceEvery): // a busy control plane may be late
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// restoreAuthority makes the restored membership safe, see [authority.Authority.Restored]. It
// returns the nodes of the membership.
func (f *clusterFlags) restoreAuthority(ctx context.Context) (nodes []string, err error) {
	c, err := queue.OpenCluster(ctx, f.cfg)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	nc, err := c.Connect("authority")
	if err != nil {
		return nil, err
	}
	defer nc.Close()
	kv, err := queue.OpenKV(ctx, nc, c.Disk(), "authority")
	if err != nil {
		return nil, err
	}
	a, err := authority.Open(authority.Config{
		Shared: &authority.Shared{Key: f.keys.key, Store: ownErrors{kv, authority.ErrNone, authority.ErrConflict}}, Name: "restore", Now: time.Now, Users: f.cfg.Keys, Log: f.cfg.Log,
	})
	if err != nil {
		return nil, err
	}
	defer a.Close()
	return a.Restored(f.keep)
}
