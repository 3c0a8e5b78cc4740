package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// NodeVerbs are the verbs of [Node].
func NodeVerbs() []string {
	return []string{"list", "describe NAME", "cordon NAME", "uncordon NAME", "drain NAME", "remove NAME", "token [revoke ID]", "tokens", "revoke NAME"}
}

// changeNode cordons, uncordons or removes a node.
func changeNode(ctx context.Context, api *client.Client, verb, name string, out io.Writer) error {
	method, path := http.MethodPost, "/system/nodes/"+url.PathEscape(name)
	if verb == "remove" {
		method = http.MethodDelete
	} else {
		path += "/" + verb
	}
	a, err := api.Do(ctx, method, path, "", nil)
	if err != nil {
		return err
	}
	if a.Status != http.StatusOK {
		return a.Unexpected("node " + verb)
	}
	said := map[string]string{
		"cordon":   "node %s is cordoned: it takes no new replicas\n",
		"uncordon": "node %s takes new replicas\n",
		"remove":   "node %s is removed\n",
	}
	_, err = fmt.Fprintf(out, said[verb], name)
	return err
}

// drainFlags are the flags of node drain.
type drainFlags struct {
	timeout     time.Duration
	force, keep bool
}

func (f *drainFlags) add(fs *flag.FlagSet) {
	fs.DurationVar(&f.timeout, "timeout", 5*time.Minute, "how long to wait; the drain goes on after it")
	fs.BoolVar(&f.force, "force", false, "after the timeout, end the replicas that are left; their calls are tried elsewhere")
	fs.BoolVar(&f.keep, "keep-parameters", false, "keep parameters in memory that no replica needs")
}

const (
	drainLook  = 300 * time.Millisecond // between looks at a drain
	drainSay   = 10 * time.Second       // after which the same progress is printed again
	forceWaits = 30 * time.Second       // for replicas to end
)

// errTimeout ends the wait for a drain.
var errTimeout = errors.New("timeout")

// drainNode drains a node, and prints the progress until that is done or the time is over.
func drainNode(ctx context.Context, api *client.Client, name string, f drainFlags, out io.Writer) error {
	if f.timeout < 0 {
		return fmt.Errorf("--timeout: %v, want 0 or more", f.timeout)
	}
	d := drainer{api: api, name: name, out: out}
	progress, err := d.order(ctx, schema.DrainOrder{KeepParameters: f.keep})
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "node %s is cordoned; its replicas move to other nodes\n", name)
	progress, err = d.wait(ctx, progress, f.timeout)
	if errors.Is(err, errTimeout) && f.force {
		fmt.Fprintf(out, "%v are over; ending what is left: %s\n", f.timeout, left(progress))
		if progress, err = d.order(ctx, schema.DrainOrder{KeepParameters: f.keep, Force: true}); err == nil {
			progress, err = d.wait(ctx, progress, forceWaits)
		}
	}
	undo := fmt.Sprintf("`stagecoach node uncordon %s` stops it", name)
	switch {
	case err == nil:
		_, err = fmt.Fprintf(out, "node %s is drained\n", name)
		return err
	case ctx.Err() != nil:
		return fmt.Errorf("node drain: no longer waiting; the drain of %s goes on, and %s", name, undo)
	case errors.Is(err, errTimeout):
		return fmt.Errorf("node drain: %s is not drained after %v: %s\nthe drain goes on, and %s; --force ends what is left", name, f.timeout, left(progress), undo)
	}
	return err
}

// drainer follows the drain of a node.
type drainer struct {
	api  *client.Client
	name string
	out  io.Writer
}

func (d drainer) path() string { return "/system/nodes/" + url.PathEscape(d.name) + "/drain" }

func (d drainer) order(ctx context.Context, o schema.DrainOrder) (progress schema.Drain, err error) {
	b, err := json.Marshal(o)
	if err != nil {
		return progress, err
	}
	a, err := d.api.Do(ctx, http.MethodPost, d.path(), "application/json", bytes.TrimSpace(b))
	if err == nil {
		err = a.Decode("node drain", &progress)
	}
	return progress, err
}

// wait prints the progress when it changes. It returns nil once the node is drained, or errTimeout.
func (d drainer) wait(ctx context.Context, progress schema.Drain, timeout time.Duration) (schema.Drain, error) {
	limit := time.NewTimer(timeout)
	defer limit.Stop()
	look := time.NewTicker(drainLook)
	defer look.Stop()
	said, at := "", time.Time{}
	for {
		if state := stateOf(progress); !progress.Done && (state != said || time.Since(at) >= drainSay) {
			said, at = state, time.Now()
			fmt.Fprintln(d.out, left(progress))
		}
		if progress.Done {
			return progress, nil
		}
		select {
		case <-ctx.Done():
			return progress, ctx.Err()
		case <-limit.C:
			return progress, errTimeout
		case <-look.C:
		}
		next := schema.Drain{}
		if err := d.api.Get(ctx, d.path(), &next); err != nil {
			if ctx.Err() != nil {
				return progress, ctx.Err()
			}
			return progress, err
		}
		progress = next
	}
}

// stateOf returns a text that changes when the progress does, but not with time alone.
func stateOf(d schema.Drain) string {
	text := fmt.Sprintf("%d %d", d.Replicas, d.Parameters)
	for _, w := range d.Waits {
		text += "\n" + w.Function + " " + w.Call + " " + w.Why
	}
	return text
}

// waitsTold is how many functions and calls a line of progress names.
const waitsTold = 5

// left describes what is left of a drain.
func left(d schema.Drain) string {
	var parts []string
	if d.Replicas > 0 || d.Parameters == 0 {
		parts = append(parts, plural(d.Replicas, "replica")+" left")
	}
	if d.Parameters > 0 {
		parts = append(parts, plural(d.Parameters, "parameter set")+" to evict")
	}
	for i, w := range d.Waits {
		if i == waitsTold {
			parts = append(parts, fmt.Sprintf("and %d more", len(d.Waits)-i))
			break
		}
		switch {
		case w.Call != "":
			parts = append(parts, fmt.Sprintf("waits for call %s of %s, running for %s", w.Call, w.Function, time.Since(w.Since).Round(time.Second)))
		case w.Function != "":
			parts = append(parts, fmt.Sprintf("waits for %s: %s", w.Function, w.Why))
		default:
			parts = append(parts, w.Why)
		}
	}
	return console.Harmless(strings.Join(parts, "; "))
}
