package cli

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/profile"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// Times of the lease on a function that is measured. The lease is renewed each time a third of its
// length has passed. Without renewal, it ends.
const (
	lease      = 10 * time.Second
	holdWait   = time.Minute       // for a replica that is ready and has its quota
	quietWait  = 2 * profile.Quiet // for a function that was just asked
	holdLook   = 50 * time.Millisecond
	letGoLimit = 5 * time.Second
)

// hold keeps a function at one replica while it is measured.
type hold struct {
	c      *client.Client
	name   string
	path   string // of the pin
	query  url.Values
	ended  sync.WaitGroup
	cancel context.CancelCauseFunc

	mu    sync.Mutex // of what the lease says, so that a renewal does not take back a change
	order struct {
		Holder   string  `json:"holder"`
		CPUMilli int     `json:"cpuMilli"`
		Seconds  float64 `json:"seconds"`
	}
	revision uint64 // of the function; 0: not yet known
}

// takeHold pins the function until letGo. The returned context ends when the lease is lost.
func takeHold(ctx context.Context, c *client.Client, name, path, namespace string) (*hold, context.Context, error) {
	h := &hold{c: c, name: name, path: path + "/pin", query: url.Values{}}
	if namespace != "" {
		h.query.Set("namespace", namespace)
	}
	h.order.Holder, h.order.Seconds = rand.Text(), lease.Seconds()
	look := time.NewTicker(holdLook)
	defer look.Stop()
	for begin := time.Now(); ; {
		_, status, err := h.put(ctx, 0)
		if err == nil {
			break
		}
		if status != http.StatusConflict || time.Since(begin) > quietWait {
			return nil, ctx, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx, ctx.Err()
		case <-look.C:
		}
	}
	held, cancel := context.WithCancelCause(ctx)
	h.cancel = cancel
	h.ended.Go(func() { h.renew(held) })
	return h, held, nil
}

// put renews the lease and sets its quota. A quota below 0 leaves it as it is.
func (h *hold) put(ctx context.Context, cpu int) (held provider.Held, status int, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if cpu >= 0 {
		h.order.CPUMilli = cpu
	}
	b, err := json.Marshal(h.order)
	if err != nil {
		return held, 0, err
	}
	ctx, stop := context.WithTimeout(ctx, lease/3)
	defer stop()
	a, err := h.c.Do(ctx, http.MethodPut, h.path+"?"+h.query.Encode(), "application/json", b)
	if err != nil {
		return held, 0, err
	}
	if a.Status != http.StatusOK {
		return held, a.Status, a.Unexpected("profile " + h.name)
	}
	if err := json.Unmarshal(a.Body, &held); err != nil {
		return held, a.Status, fmt.Errorf("profile %s: %w", h.name, err)
	}
	if h.revision == 0 {
		h.revision = held.Revision
	}
	if h.revision != held.Revision {
		return held, a.Status, fmt.Errorf("function %s was deployed again while it was measured; measure it again", h.name)
	}
	return held, a.Status, nil
}

// renew keeps the lease until ctx ends. It cancels the hold's context if it fails twice in a row,
// or if somebody else has the lease.
func (h *hold) renew(ctx context.Context) {
	tick := time.NewTicker(lease / 3)
	defer tick.Stop()
	for failures := 0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		_, status, err := h.put(ctx, -1)
		if err == nil {
			failures = 0
			continue
		}
		if failures++; failures == 2 || status != 0 {
			h.cancel(fmt.Errorf("the function is not held any more: %w", err))
			return
		}
	}
}

// set sets the quota of the replica; 0 is the declared one. It returns once the replica is ready
// and has the quota.
func (h *hold) set(ctx context.Context, cpu int) (provider.Held, error) {
	ctx, stop := context.WithTimeoutCause(ctx, holdWait, fmt.Errorf("%s has no replica that is ready, alone, and has its CPU, within %v; `stagecoach describe %[1]s` may say why", h.name, holdWait))
	defer stop()
	look := time.NewTicker(holdLook)
	defer look.Stop()
	for {
		held, _, err := h.put(ctx, cpu)
		switch {
		case err != nil:
			return held, cmpErr(context.Cause(ctx), err)
		case held.Unbounded:
			return held, fmt.Errorf("profile %s: node %q does not limit the CPU of its replica: want one with cgroups, and a function without stagecoach.dev/process", h.name, held.Node)
		case held.Ready && held.CPUMilli == cpu:
			return held, nil
		}
		select {
		case <-ctx.Done():
			return held, context.Cause(ctx)
		case <-look.C:
		}
	}
}

// cmpErr returns cause, or err if cause is nil.
func cmpErr(cause, err error) error {
	if cause != nil {
		return cause
	}
	return err
}

// letGo ends the lease. If the request fails, the lease ends by itself soon.
func (h *hold) letGo(ctx context.Context) error {
	h.cancel(errors.New("the function was let go"))
	h.ended.Wait()
	ctx, stop := context.WithTimeout(context.WithoutCancel(ctx), letGoLimit)
	defer stop()
	h.query.Set("holder", h.order.Holder)
	a, err := h.c.Do(ctx, http.MethodDelete, h.path+"?"+h.query.Encode(), "", nil)
	// Not found: the function may have been removed.
	if err == nil && a.Status != http.StatusOK && a.Status != http.StatusNotFound {
		err = a.Unexpected("let go of " + h.name)
	}
	if err != nil {
		return fmt.Errorf("%w; it is as it was within %v", err, lease)
	}
	return nil
}
