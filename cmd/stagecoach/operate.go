package main

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/control"
	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/admin"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/request/dispatch"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// nodeOperator implements admin.Operator.
type nodeOperator struct {
	nodes     *nodes
	local     *cluster.Local
	lines     *dispatch.Shell
	loop      *control.Loop
	functions deployed
	log       *slog.Logger
}

func operatorOf(u *up) nodeOperator {
	return nodeOperator{u.nodes, u.local, u.lines, u.loop, u.deployedFunctions(), u.log}
}

// List implements admin.Operator.
func (o nodeOperator) List() []schema.Node {
	records := o.nodes.cordons.all()
	var out []schema.Node
	for _, inv := range o.nodes.Inventories() {
		out = append(out, o.describe(inv))
	}
	for _, a := range o.nodes.away() {
		_, cordoned := records[a.Name]
		if !a.Ended || cordoned {
			status := schema.NodeSilent
			if a.Heard {
				status = schema.NodeUnreachable
			}
			out = append(out, schema.Node{Inventory: a.Inventory, Status: status, Since: a.Since, Cordoned: cordoned, Cause: a.Cause})
		}
	}
	for name := range records {
		if !slices.ContainsFunc(out, func(n schema.Node) bool { return n.Name == name }) {
			inv := node.Inventory{V: node.Version, Identity: node.Identity{Name: name}, Devices: []node.Device{}, Zygotes: []node.Zygote{}, Failures: []node.Failure{}, Replicas: []node.Replica{}}
			out = append(out, schema.Node{Inventory: inv, Status: schema.NodeSilent, Cordoned: true, Cause: "it has not been heard since the control plane started"})
		}
	}
	slices.SortFunc(out, func(a, b schema.Node) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// describe returns a node that is heard.
func (o nodeOperator) describe(inv node.Inventory) schema.Node {
	record, closed := o.nodes.cordons.of(inv.Name)
	_, cordoned := o.nodes.cordons.stored(inv.Name)
	n := schema.Node{Inventory: inv, Status: schema.NodeReady, Since: record.Since, Cordoned: cordoned, Machine: record.cause}
	switch {
	case inv.Leaving:
		n.Status = schema.NodeLeaving
	case record.Draining && o.progress(inv.Name, record).Done:
		n.Status = schema.NodeDrained
	case record.Draining:
		n.Status = schema.NodeDraining
	case closed:
		n.Status = schema.NodeCordoned
	}
	return n
}

// find returns the node with a name.
func (o nodeOperator) find(name string) (schema.Node, error) {
	for _, n := range o.List() {
		if n.Name == name {
			return n, nil
		}
	}
	return schema.Node{}, fmt.Errorf("node %q: %w", name, admin.ErrNoNode)
}

// Cordon implements admin.Operator.
func (o nodeOperator) Cordon(ctx context.Context, name string) error {
	n, err := o.find(name)
	if err != nil || n.Cordoned { // a drain goes on
		return err
	}
	if err := o.nodes.cordons.set(ctx, name, cordon{}); err != nil {
		return err
	}
	o.log.Info("node cordoned: it takes no new replicas", "node", name)
	return nil
}

// Uncordon implements admin.Operator.
func (o nodeOperator) Uncordon(ctx context.Context, name string) error {
	n, err := o.find(name)
	if err != nil {
		return err
	}
	if n.Cordoned {
		if err := o.nodes.cordons.lift(ctx, name); err != nil {
			return err
		}
	}
	if record, _ := o.nodes.cordons.of(name); record.machine != "" {
		return fmt.Errorf("node %q: %w: %s, so the node stays drained; `kubectl uncordon %s` opens a cordoned machine", name, admin.ErrNotNow, record.cause, record.machine)
	}
	if n.Cordoned {
		o.log.Info("node uncordoned: it takes new replicas", "node", name)
	}
	return nil
}

// Drain implements admin.Operator.
func (o nodeOperator) Drain(ctx context.Context, name string, order schema.DrainOrder) error {
	if _, err := o.find(name); err != nil {
		return err
	}
	was, _ := o.nodes.cordons.stored(name)
	if err := o.nodes.cordons.set(ctx, name, cordon{Draining: true, KeepParameters: order.KeepParameters}); err != nil {
		return err
	}
	if !was.Draining {
		o.log.Info("node is drained: its replicas go elsewhere", "node", name)
	}
	if order.Force {
		for _, r := range o.left(name) {
			o.log.Warn("replica is ended, because its node is drained by force; its calls are tried elsewhere", "node", name, "function", r.function, "replica", r.Name)
			o.local.Lost(r.Name, task.Death{Cause: "its node is drained by force", End: task.EndShared})
		}
	}
	return nil
}

// Progress implements admin.Operator.
func (o nodeOperator) Progress(name string) (schema.Drain, error) {
	record, _ := o.nodes.cordons.of(name)
	if record.Draining {
		return o.progress(name, record), nil
	}
	if _, err := o.find(name); err != nil {
		return schema.Drain{}, err
	}
	return schema.Drain{}, fmt.Errorf("node %q: %w: it is not being drained; `stagecoach node drain %s` drains it", name, admin.ErrNotNow, name)
}

func (o nodeOperator) progress(name string, record cordon) schema.Drain {
	d := schema.Drain{Node: name, Waits: []schema.DrainWait{}}
	seen := map[string]bool{}
	_, p := o.loop.Last()
	for _, r := range o.left(name) {
		d.Replicas++
		for _, w := range o.waits(r, &p) {
			if key := w.Function + " " + w.Call + " " + w.Why; !seen[key] {
				seen[key] = true
				d.Waits = append(d.Waits, w)
			}
		}
	}
	if inv, ok := o.nodes.heard(name); ok {
		d.Replicas = max(d.Replicas, len(inv.Replicas)) // processes that end, or that are not known
		if len(d.Waits) == 0 && d.Replicas > 0 {
			d.Waits = append(d.Waits, schema.DrainWait{Why: "processes of replicas end"})
		}
		if !record.KeepParameters {
			d.Parameters = len(evictable(inv))
		}
		if len(d.Waits) == 0 && d.Parameters > 0 {
			d.Waits = append(d.Waits, schema.DrainWait{Why: "parameters are evicted"})
		}
	}
	d.Done = d.Replicas == 0 && d.Parameters == 0
	return d
}

// onNode is a replica on a node.
type onNode struct {
	cluster.Replica

	function pipeline.Key
}

// left returns the replicas of a node, sorted by function and name.
func (o nodeOperator) left(name string) (out []onNode) {
	for key := range o.local.Counts() {
		for _, r := range o.local.Replicas(key) {
			if r.Node == name {
				out = append(out, onNode{r, key})
			}
		}
	}
	slices.SortFunc(out, func(a, b onNode) int {
		return cmp.Or(cmp.Compare(a.function.String(), b.function.String()), cmp.Compare(a.Name, b.Name))
	})
	return out
}

// callsTold bounds the calls per replica that a drain names.
const callsTold = 3

// waits returns what keeps a replica on its node.
func (o nodeOperator) waits(r onNode, p *plan.Plan) []schema.DrainWait {
	w := schema.DrainWait{Function: r.function.String(), Replica: r.Name}
	switch {
	case r.Hidden:
		w.Why = "the node is silent, and the replica serves until its connection ends; --force ends it"
	case r.State == plan.Starting:
		w.Why = "a replica still starts"
	case r.State == plan.Draining:
		return o.calls(r, w)
	default:
		w.Why = o.missing(r.function, p)
	}
	return []schema.DrainWait{w}
}

// calls returns what a draining replica waits for.
func (o nodeOperator) calls(r onNode, w schema.DrainWait) (out []schema.DrainWait) {
	calls := o.lines.Calls(r.function, r.Name)
	for _, c := range calls[:min(len(calls), callsTold)] {
		w.Call, w.Since, w.Why = c.Request, c.Since.UTC(), "a call runs"
		out = append(out, w)
	}
	if len(out) > 0 {
		return out
	}
	w.Why = "a replica ends"
	if due := o.lines.Due(r.function, r.Name); time.Until(due) > 0 {
		w.Why = fmt.Sprintf("requests that have begun on revision %d, until %s at the latest", r.Revision, due.UTC().Format(time.TimeOnly))
	}
	return []schema.DrainWait{w}
}

// missing returns why a function's replica has no replacement yet.
func (o nodeOperator) missing(function pipeline.Key, p *plan.Plan) string {
	i := slices.IndexFunc(p.Wants, func(w plan.Want) bool { return w.Function == function.String() })
	if i >= 0 && p.Wants[i].Short != "" {
		short := p.Wants[i].Short
		if _, reason, ok := strings.Cut(short, " placed: "); ok {
			short = reason
		}
		return fmt.Sprintf("no other node has room (%s)", short)
	}
	if count, until, cause := o.local.Failure(function); count > 0 {
		return fmt.Sprintf("its replacement does not start: %d failures in a row, the next try is at %s; the last one: %s", count, until.UTC().Format(time.TimeOnly), cause)
	}
	return "its replacement starts on another node"
}

// Remove implements admin.Operator.
func (o nodeOperator) Remove(ctx context.Context, name string) error {
	n, err := o.find(name)
	if err != nil {
		return err
	}
	refuse := func(format string, args ...any) error {
		return fmt.Errorf("node %q: %w: %s", name, admin.ErrNotNow, fmt.Sprintf(format, args...))
	}
	drain := fmt.Sprintf("`stagecoach node drain %s`", name)
	left := o.left(name)
	switch {
	case n.Embedded:
		return refuse("it is a part of `stagecoach up`; start that with --no-node")
	case len(left) > 0 && n.Away():
		return refuse("%s has %d replicas that may still serve; wait until it is back, or end them with `stagecoach node drain %s --force`", name, len(left), name)
	case len(left) > 0:
		return refuse("it has %d replicas, such as %s of %s; %s moves them elsewhere", len(left), left[0].Name, left[0].function, drain)
	case !n.Away() && n.Status != schema.NodeDrained:
		return refuse("it is %s; %s first, or stop its daemon", n.Status, drain)
	}
	if d := o.nodes.joined.Load(); d != nil {
		if err := d.Remove(ctx, name, "an operator removed the node; start the daemon again to join with it"); err != nil {
			return err
		}
	}
	if err := o.nodes.cordons.lift(ctx, name); err != nil {
		return err
	}
	if o.nodes.authority != nil {
		if err := o.nodes.authority.Release(name); err != nil {
			return err
		}
	}
	o.log.Info("node removed", "node", name)
	return nil
}

// tidyEvery is the time between two looks for parameters to evict on drained nodes.
const tidyEvery = 500 * time.Millisecond

// tidyTimeout bounds the evictions of a look at a node.
const tidyTimeout = 10 * time.Second

// tidy evicts what drained nodes keep in memory without a replica, until ctx ends.
func (o nodeOperator) tidy(ctx context.Context) error {
	look := time.NewTicker(tidyEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-look.C:
		}
		if !o.nodes.cordons.any() {
			continue
		}
		for _, inv := range o.nodes.Inventories() {
			if record, _ := o.nodes.cordons.of(inv.Name); record.Draining && !record.KeepParameters {
				o.nodes.once("drain "+inv.Name, func(ctx context.Context) { o.evict(ctx, inv) })
			}
		}
	}
}

// evict frees the parameters that a drained node keeps in memory without a replica. The next look
// tries again those that could not be freed.
func (o nodeOperator) evict(ctx context.Context, inv node.Inventory) {
	ctx, cancel := context.WithTimeout(ctx, tidyTimeout)
	defer cancel()
	for _, z := range evictable(inv) {
		for _, what := range o.users(z) {
			if _, err := o.nodes.Evict(ctx, inv.Name, what); err != nil {
				o.log.Debug("parameters of a drained node were not evicted", "node", inv.Name, "what", what, "error", err)
			}
		}
	}
	for function := range inv.Spares {
		if !slices.ContainsFunc(inv.Replicas, func(r node.Replica) bool { return r.Function == function }) {
			o.nodes.forgetOn(ctx, inv.Name, function)
		}
	}
}

// evictable returns the zygotes and workers that no replica runs from.
func evictable(inv node.Inventory) (out []node.Zygote) {
	for _, z := range inv.Zygotes {
		if z.State == node.Ready && z.Replicas == 0 {
			out = append(out, z)
		}
	}
	return out
}

// users returns the names under which Evict knows a zygote or a worker: functions, or a digest.
func (o nodeOperator) users(z node.Zygote) []string {
	if z.Worker == "" {
		return []string{cmp.Or(z.Function, z.Digest)}
	}
	var out []string
	for _, f := range o.functions.Registry.Functions() {
		if f.Declared.Namespace == z.Namespace && f.Declared.Process == z.Worker {
			out = append(out, f.Key.String())
		}
	}
	return out
}

// heard returns the inventory of a node that is heard.
func (n *nodes) heard(name string) (node.Inventory, bool) {
	for _, inv := range n.Inventories() {
		if inv.Name == name {
			return inv, true
		}
	}
	return node.Inventory{}, false
}

// away returns the daemons that were heard earlier and are silent now.
func (n *nodes) away() []node.Absence {
	d := n.joined.Load()
	if d == nil {
		return nil
	}
	return d.Away()
}

// once runs f in the background, unless it still runs from an earlier call with the same name.
func (n *nodes) once(what string, f func(context.Context)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.forgetting[what] || n.ctx.Err() != nil {
		return
	}
	n.forgetting[what] = true
	n.group.Go(func() {
		f(n.ctx)
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.forgetting, what)
	})
}

// forgetOn tells a node that a function has no replicas there, so that the node ends what it keeps
// for the next starts of the function.
func (n *nodes) forgetOn(ctx context.Context, name, function string) {
	if n.keys != nil && name == n.self.Name {
		n.keys.Forget(function)
		return
	}
	n.far.forgotten(name, function)
	_, _ = n.order(ctx, name, node.Order{Kind: node.OrderForget, Function: function}) // tried again
}
