package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

const (
	// ReadyPatience bounds deploy --wait.
	ReadyPatience = 2 * time.Minute
	readyPoll     = 100 * time.Millisecond
)

// awaited is a deployment whose revision is not ready yet.
type awaited struct {
	Deployment
	woken bool  // it was asleep, and was asked to start a replica
	late  error // why it is not ready, at the latest look
}

// WaitReady waits until the deployed revision of each function has the replicas that it must have,
// for at most ReadyPatience. It wakes a sleeping revision to test that the revision starts, and
// then puts it to sleep again. It returns an error as soon as the platform knows why a revision
// cannot start. The error also names the other functions that are not ready at that moment.
func WaitReady(ctx context.Context, c *Client, all []Deployment, out io.Writer) error {
	ctx, cancel := context.WithTimeout(ctx, ReadyPatience)
	defer cancel()
	begin := time.Now()
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	var waiting []*awaited
	for _, d := range all {
		waiting = append(waiting, &awaited{Deployment: d, late: fmt.Errorf("%s: not checked", d.Service)})
	}
	for {
		var failed []error
		var left []*awaited
		for _, a := range waiting {
			said, err := a.look(ctx, c, begin)
			switch {
			case err != nil:
				failed = append(failed, err)
			case said != "":
				fmt.Fprintf(out, "%s: %s\n", a.Service, said)
			default:
				left = append(left, a)
			}
		}
		waiting = left
		if len(failed) == 0 && len(waiting) > 0 && ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-tick.C:
				continue
			}
		}
		for _, a := range waiting {
			failed = append(failed, a.late)
		}
		return errors.Join(failed...)
	}
}

// look asks for the status of the revision. ready is a text for the user if the revision is ready.
// failed is set if the revision cannot start. If both are empty, the revision may still become
// ready.
func (a *awaited) look(ctx context.Context, c *Client, begin time.Time) (ready string, failed error) {
	var s FunctionStatus
	err := c.Get(ctx, a.path("function"), &s)
	least, took := a.least(), time.Since(begin).Seconds()
	switch {
	case err != nil:
	case s.In(provider.StatusFailing):
		return "", fmt.Errorf("%s: %s%s", a.Service, console.Harmless(s.Status()), a.lastWords(ctx, c))
	case s.In(provider.StatusAsleep) && a.woken:
		return fmt.Sprintf("asleep after %.1f s", took), nil
	case s.In(provider.StatusAsleep):
		a.woken = true
		err = a.scale(ctx, c, 1)
	case a.woken && s.AvailableReplicas > 0:
		if err = a.scale(ctx, c, 0); err == nil {
			return fmt.Sprintf("starts, seen after %.1f s; asleep again", took), nil
		}
	case !a.woken && s.AvailableReplicas >= least:
		return fmt.Sprintf("ready with %d replicas after %.1f s", s.AvailableReplicas, took), nil
	}
	if ctx.Err() != nil {
		return "", nil // the earlier a.late says more
	}
	a.late = errors.Join(fmt.Errorf("%s: after %.0f s %d replicas, want %d: %s; `stagecoach logs %[1]s` may say why",
		a.Service, took, s.AvailableReplicas, least, console.Harmless(s.Status())), err)
	return "", nil
}

// least returns how many replicas the function must have while it is awake.
func (a *awaited) least() int {
	// A number or absent, because the deploy was accepted.
	n, _ := strconv.Atoi(a.Labels["com.openfaas.scale.min"])
	return max(n, 1)
}

func (a *awaited) scale(ctx context.Context, c *Client, replicas int) error {
	return c.Send(ctx, "scale "+a.Service, http.MethodPost, a.path("scale-function"), map[string]any{"serviceName": a.Service, "replicas": replicas})
}

// Query returns the query of paths that take a namespace; empty for the default one.
func Query(namespace string) string {
	if namespace == "" {
		return ""
	}
	return "?namespace=" + url.QueryEscape(namespace)
}

// path returns the path of one of the function's resources.
func (a *awaited) path(resource string) string {
	return "/system/" + resource + "/" + url.PathEscape(a.Service) + Query(a.Namespace)
}

// lastWords returns the last lines of the replica that failed last. It is empty if there are none
// or if the logs cannot be read. The cause is printed in any case.
func (a *awaited) lastWords(ctx context.Context, c *Client) string {
	const most = 5 // lines
	var t schema.Timeline
	if err := c.Get(ctx, a.path("timeline"), &t); err != nil {
		return ""
	}
	q := url.Values{"name": {a.Service}, "namespace": {cmp.Or(a.Namespace, pipeline.DefaultNamespace)}, "tail": {strconv.Itoa(most)}}
	for _, e := range t.Events {
		if e.Kind == schema.Failed || e.Kind == schema.Lost {
			q.Set("instance", e.Replica)
		}
	}
	if !q.Has("instance") { // no replica was started
		return ""
	}
	resp, err := c.Stream(ctx, http.MethodGet, "/system/logs?"+q.Encode(), nil, nil)
	if err != nil {
		return ""
	}
	defer resp.Body.Close()
	var lines strings.Builder
	if err := errors.Join(Refused(resp, "logs"), PrintLogs(resp.Body, &lines)); err != nil || lines.Len() == 0 {
		return ""
	}
	return "\nits last lines:\n" + console.Harmless(strings.TrimRight(lines.String(), "\n"))
}
