package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/provider/secret/copies"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// controlPlane is what a control plane announces of itself.
type controlPlane struct {
	V       int    `json:"v"`  // 1
	ID      string `json:"id"` // as its lease has it
	Name    string `json:"name"`
	Listen  string `json:"listen"`            // its API
	Address string `json:"address,omitempty"` // for other control planes; empty: they cannot reach it
	Leads   bool   `json:"leads,omitempty"`
	Held    bool   `json:"held,omitempty"` // it holds the lease now
	// Secrets that it lacks, as namespace/name; at most lacksTold.
	Lacks   []string `json:"lacks,omitempty"`
	Lacking int      `json:"lacking,omitempty"` // how many there are
	Reaches int      `json:"reaches,omitempty"` // how many nodes on other machines are connected
}

// Times of announcements.
const (
	announceEvery = time.Second
	silentPlane   = 3500 * time.Millisecond // after which a control plane counts as gone
)

const (
	announceName = "control planes"
	lacksTold    = 5
)

// heardPlane is another control plane.
type heardPlane struct {
	controlPlane
	at time.Time
}

// controls knows the control planes that share a NATS cluster. It is safe for concurrent use.
type controls struct {
	u       *up
	bus     *queue.Bus
	resigns chan error // gets why this process must not lead any more

	mu      sync.Mutex
	address string // of this process, for the others
	heard   map[string]heardPlane
}

// openControls begins to hear the other control planes. The announcements of this process begin
// with its lease.
func (l *leading) openControls(context.Context) error {
	u := l.u
	if !l.outside() {
		return nil
	}
	nc, err := u.nats.Connect("controls")
	if err != nil {
		return err
	}
	u.onClose(func() error { nc.Close(); return nil })
	c := &controls{u: u, bus: queue.NewBus(nc), resigns: make(chan error, 1), heard: map[string]heardPlane{}}
	l.controls = c
	stop, err := c.bus.Hear(announceName, c.hear)
	if err != nil {
		return err
	}
	u.onClose(func() error { stop(); return nil })
	return nil
}

// self describes this process.
func (c *controls) self() controlPlane {
	l := c.u.leading
	_, err := l.epoch()
	is := controlPlane{V: 1, ID: l.me, Name: c.u.cfg.Node.Name, Listen: c.u.cfg.Listen, Leads: l.leads(), Held: err == nil, Reaches: c.reaches()}
	lacks := l.lacks()
	is.Lacks, is.Lacking = lacks[:min(len(lacks), lacksTold)], len(lacks)
	c.mu.Lock()
	defer c.mu.Unlock()
	is.Address = c.address
	return is
}

// run announces this process until ctx ends. If this process leads and should not, it resigns.
func (c *controls) run(ctx context.Context) error {
	tick := time.NewTicker(announceEvery)
	defer tick.Stop()
	for {
		b, err := json.Marshal(c.self())
		if err != nil {
			return err
		}
		_ = c.bus.Announce(announceName, b) // the next one may be sent
		c.resign()
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// hear takes an announcement.
func (c *controls) hear(msg []byte) {
	var is controlPlane
	if json.Unmarshal(msg, &is) != nil || is.V != 1 || is.ID == "" || is.ID == c.u.leading.me {
		return // of a later version, or of this process
	}
	c.mu.Lock()
	now := time.Now()
	_, known := c.heard[is.ID]
	c.heard[is.ID] = heardPlane{is, now}
	maps.DeleteFunc(c.heard, func(_ string, h heardPlane) bool { return now.Sub(h.at) > time.Minute })
	c.mu.Unlock()
	if copies := c.u.leading.copies.Load(); !known && copies != nil {
		copies.Poke()
	}
}

// others returns the other control planes that are alive, by their names and ids.
func (c *controls) others() (out []controlPlane) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, h := range c.heard {
		if time.Since(h.at) <= silentPlane {
			out = append(out, h.controlPlane)
		}
	}
	slices.SortFunc(out, func(a, b controlPlane) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	return out
}

// peers returns the other control planes that secrets are copied to and from.
func (c *controls) peers() (out []copies.Peer) {
	for _, is := range c.others() {
		if is.Address != "" {
			out = append(out, copies.Peer{Name: is.ID, Address: is.Address})
		}
	}
	return out
}

// planes implements admin.Config's Planes. c is nil if NATS is inside.
func (c *controls) planes() []schema.ControlPlane {
	out := []schema.ControlPlane{}
	if c == nil {
		return out
	}
	for _, is := range append([]controlPlane{c.self()}, c.others()...) {
		p := schema.ControlPlane{Name: is.Name, ID: is.ID, Listen: is.Listen, Status: schema.PlaneStandsBy, Lacks: is.Lacks, Cause: lacksText(is)}
		switch {
		case is.Leads && is.Held:
			p.Status = schema.PlaneLeads
		case is.Leads:
			p.Status, p.Cause = schema.PlaneLapsed, "its lease of control has lapsed: it starts and stops nothing"
		case is.Lacking > 0:
			p.Status = schema.PlaneLacks
		}
		out = append(out, p)
	}
	return out
}

// lacksText says which secrets a control plane lacks; empty: it has all.
func lacksText(is controlPlane) string {
	if is.Lacking == 0 {
		return ""
	}
	text := fmt.Sprintf("it lacks the secrets %s", strings.Join(is.Lacks, ", "))
	if more := is.Lacking - len(is.Lacks); more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}
