package main

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/logbook"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// newNodes returns an empty set of nodes.
func newNodes(name string) (*nodes, error) {
	self, err := node.Identify(name, version())
	n := &nodes{self: self, forgetting: map[string]bool{}, told: map[string]toldImages{}}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	return n, err
}

// own returns this process as the cluster's first node, if it is a node.
func (n *nodes) own(functions deployed) []cluster.Node {
	if n.keys == nil {
		return nil
	}
	return []cluster.Node{localNode{n.keys, functions.has, functions.withSecrets}}
}

// openNode makes this process a node.
func (u *up) openNode() error {
	devices, done, err := openDevices(u.cfg.Node.Devices, u.log)
	if err != nil {
		return fmt.Errorf("node.devices: %w", err)
	}
	u.onClose(func() error { done(); return nil })
	groups, done := openGroups(u.cfg.Node.Name, u.cfg.State, u.log)
	u.onClose(func() error { done(); return nil })
	id := nodeID(u.cfg.Node.Name, u.cfg.State)
	runtime, err := u.cfg.Runtime.open(context.Background(), id, nil, u.log)
	if err != nil {
		return err
	}
	u.nodes.containers = u.cfg.Runtime.lists(id)
	processes := warden.InProcess(runtime)
	u.onClose(func() error { processes.Close(); return nil })
	u.nodes.keys, err = keysmanager.New(keysmanager.Config{
		Node: u.cfg.Node.Name, Images: u.images, ORT: u.cfg.ORT,
		Cache: filepath.Join(u.cfg.State, "cache"), Memory: int64(u.cfg.Node.Memory), Watchdog: u.cfg.Runtime.watchdog(id), Warden: processes, Devices: devices, Groups: groups, Accounts: u.accounts.forKeys(),
		Networks: u.networks.forKeys(), Allowed: keysmanager.Allowed{HostNetwork: u.cfg.Isolation.HostNetwork, Spares: u.cfg.Runtime.spares()},
		OnExit: func(e keysmanager.Exit) {
			u.local.Lost(e.Replica, task.Death{Cause: e.Cause, End: e.End, Memory: e.Memory})
		},
		OnEvict: func(function string, bytes int64) { u.evicted(time.Time{}, u.cfg.Node.Name, function, bytes) },
		Output: func(function, replica, stream, line string) {
			u.printed(function, logbook.Line{At: time.Now().UTC(), Replica: replica, Stream: stream, Text: line})
		},
		Log: u.log, Metrics: prometheus.WrapRegistererWith(prometheus.Labels{"node": u.cfg.Node.Name}, u.metrics),
	})
	if err != nil {
		return err
	}
	u.onClose(func() error { u.nodes.keys.Close(); return nil })
	return nil
}

// printed handles a line that a replica or zygote has printed.
func (u *up) printed(function string, l logbook.Line) {
	u.book.Add(pipeline.ParseKey(function), l)
	u.log.Debug("output", "function", function, "replica", l.Replica, "stream", l.Stream, "line", l.Text)
}

// connectNodes opens the connection to daemons. It stays open until all replicas are stopped.
func (u *up) connectNodes() error {
	if !u.cfg.NATS.joining() {
		return nil
	}
	nc, err := u.nats.Connect("nodes")
	if err != nil {
		return err
	}
	u.onClose(func() error { nc.Close(); return nil })
	u.onClose(func() error { u.nodes.close(); return nil })
	u.nodes.bus, u.nodes.log = queue.NewLink(nc), u.log
	if u.nodes.authority == nil {
		return nil // the operator of the cluster decides who may connect
	}
	if err := openTunnel(u); err != nil {
		return err
	}
	serve := serveAuthority
	if u.leading.outside() { // the control plane that leads decides who may join
		serve = reachNodes
	}
	stop, err := serve(u)
	if err != nil {
		return err
	}
	u.onClose(func() error { stop(); return nil })
	return nil
}

// openNodes lets daemons join, unless another control plane may lead. All parts that handle their
// messages exist by then.
func (u *up) openNodes(context.Context) error {
	u.background(operatorOf(u).tidy)
	switch {
	case u.nodes.bus == nil:
		return nil
	case u.leading.outside():
		return u.nodes.standBy()
	}
	return u.joinNodes()
}

// joinNodes lets daemons join.
func (u *up) joinNodes() error {
	own := ""
	if u.nodes.keys != nil {
		own = u.nodes.self.Name
	}
	u.nodes.sources = &nodeSources{
		self: u.nodes.self, name: u.nodes.far.name(), control: u.images.share.source, packs: u.images.share.packs, all: u.nodes.announced,
	}
	joined, err := node.OpenDirectory(node.DirectoryConfig{
		Bus: u.nodes.bus, Boot: u.nodes.self.Boot, Version: version(), Own: own, Codes: errorCodes(), Epoch: u.leading.epoch, Log: u.log,
		Dial: u.nodes.far.dial(), Prepare: u.nodes.far.prepare, Keep: u.leading.outside(), First: u.nodes.heardStandingBy(),
		Joined: func(c *node.Client) {
			u.local.Join(remoteNode{c, u.nodes.sources, u.leading.kube.before(u.deployedFunctions().withSecrets)})
		},
		Left:  func(name, _ string) { u.local.Leave(name) },
		Heard: u.heard,
		Event: u.nodeEvent,
		Line: func(name string, l node.Line) {
			if l.Lost > 0 {
				u.log.Warn("lines of replicas were lost: replicas printed faster than the daemon read", "node", name, "lines", l.Lost)
				return
			}
			if !u.deployedFunctions().has(l.Function) {
				return // a daemon keeps lines of functions that were removed meanwhile
			}
			u.printed(l.Function, logbook.Line{At: l.At, Replica: l.Replica, Stream: l.Stream, Text: l.Text})
		},
	})
	if err == nil {
		u.nodes.joined.Store(joined)
	}
	return err
}

// has reports whether a function is deployed. Its name is the key as text.
func (d deployed) has(function string) bool { return d.Has(pipeline.ParseKey(function)) }

// Has implements cluster.Functions.
func (d deployed) Has(function pipeline.Key) bool {
	_, ok := d.Function(function)
	return ok
}

// heard handles the announcement of a daemon: its replicas, and the functions whose parameters it
// has.
func (u *up) heard(c *node.Client) {
	inv := c.Inventory()
	running := make([]string, len(inv.Replicas))
	for i, r := range inv.Replicas {
		running[i] = r.Name
	}
	u.local.Running(inv.Name, running, offers(inv)...)
	u.nodes.tellImages(c, func() []string { return imagesInUse(u) })
	for _, z := range inv.Zygotes {
		if z.Function == "" || z.State != node.Ready || u.deployedFunctions().has(z.Function) {
			continue
		}
		u.nodes.forgetThere(c, z.Function)
	}
	for function := range inv.Spares {
		if !u.deployedFunctions().has(function) {
			u.nodes.forgetThere(c, function)
		}
	}
	for _, function := range inv.Secrets {
		if !u.deployedFunctions().has(function) {
			u.nodes.forgetThere(c, function)
		}
	}
}

// nodeEvent handles an event of a daemon.
func (u *up) nodeEvent(name string, e node.Event) {
	switch e.Kind {
	case node.EventExit:
		u.local.Lost(e.Replica, task.Death{Cause: e.Cause, End: task.End(e.End), Memory: (*task.MemoryError)(e.Memory)})
	case node.EventEvict:
		u.evicted(e.At, name, e.Function, e.Bytes) // possibly from before this process started
	}
}
