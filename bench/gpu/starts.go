package gpu

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/starts"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// Memory that cells need beside parameters, in bytes.
const (
	gpuContext = 1 << 30 // of the device, of a process with a context
	hostBase   = 2 << 30 // of the machine
)

// together is the number of replicas that are started at once, to see how they slow each other
// down. The names of the cells of such starts end in atOnceCell.
const (
	together   = 4
	atOnceCell = "_x4"
)

// gpuNeed returns the bytes of device memory that a replica reserves.
func gpuNeed(s gpuSize) int64 { return s.bytes + s.bytes/8 + gpuContext }

// gpuWay starts a stage on one path.
type gpuWay struct {
	g     *gpuBench
	b     *starts.Stage
	s     gpuSize
	name  string    // of gpuPaths
	cell  string    // its case
	path  string    // start path of the KeysManager that is wanted; empty: started by hand
	spec  node.Spec // of its function
	said  *gpuSaid
	slow  bool // half as many starts are measured
	parks bool // a child has to be parked before each start

	single, several bool // cells of this turn: starts one after the other, and at the same time

	mu sync.Mutex
	n  int // replicas so far
}

// ways returns the paths of a turn that have cells which no earlier run has measured.
func (g *gpuBench) ways(s gpuSize, turn int) (out []*gpuWay) {
	for _, name := range g.paths {
		w := &gpuWay{g: g, s: s, name: name, cell: s.name + "_" + name, slow: name == "plain" || name == "cold"}
		hasGoal := name != "heap" && name != "cold"
		switch turn {
		case turnGoals:
			w.single, w.several = hasGoal, name == "fork"
		case turnOthers:
			w.single = !hasGoal
		case turnAtOnce:
			w.several = name != "fork"
		case turnBare:
			w.single, w.cell = name == "fork", w.cell+"_bare"
		}
		w.single = w.single && !g.cells.before[w.cell]
		w.several = w.several && !g.cells.before[w.cell+atOnceCell]
		if w.single || w.several {
			out = append(out, w)
		}
	}
	return out
}

// starts measures paths, as in the product or bare.
func (g *gpuBench) starts(ctx context.Context, b *starts.Stage, ways []*gpuWay, bare bool) {
	if len(ways) > 0 && ways[0].name == "plain" { // the others are compared with it
		ways[0].b = b
		ways[0].cells(ctx)
		ways = ways[1:]
	}
	if len(ways) == 0 || bare && g.lacksAll() {
		return // bare starts would be the same
	}
	said := &gpuSaid{parts: map[string]chan starts.DeviceParts{}}
	b.Told = said.told
	lacks, err := g.manage(b, bare)
	defer b.Shut()
	for _, w := range ways {
		if err != nil {
			for _, name := range w.names() {
				g.cells.ended(name, 0, fmt.Errorf("no KeysManager: %w", err))
			}
			continue
		}
		if lacks != "" {
			g.report.Note(w.names()[0], lacks)
		}
		w.managed(b, said)
		w.cells(ctx)
	}
}

// lacksAll reports whether replicas ran without accounts, cgroups and networks although the bench
// asked for them, in this run or an earlier one.
func (g *gpuBench) lacksAll() bool {
	return slices.ContainsFunc(g.report.Notes, func(n bench.Note) bool { return n.Text == lacksAll })
}

// managed completes a way whose replicas the KeysManager starts. Each path has its own function.
func (w *gpuWay) managed(b *starts.Stage, said *gpuSaid) {
	w.b, w.said, w.path, w.spec = b, said, w.name, b.Spec(w.name)
	switch w.name {
	case "heap":
		w.path, w.spec.Image = keysmanager.PathHeap, heapImage
	case "parked":
		w.spec.Start, w.parks = "auto", true
	case "resident":
		w.spec.Start, w.spec.Worker = "auto", starts.Namespace
	}
	w.spec.Devices, w.spec.DeviceMemory = 1, gpuNeed(w.s)
}

// names returns the names of the cells that this turn measures; there is at least one.
func (w *gpuWay) names() (out []string) {
	if w.single {
		out = append(out, w.cell)
	}
	if w.several {
		out = append(out, w.cell+atOnceCell)
	}
	return out
}

// often returns how many starts are counted.
func (w *gpuWay) often() int {
	if w.slow {
		return max(2, w.g.often/2)
	}
	return w.g.often
}

// oneCell returns the cell of starts one after the other.
func (w *gpuWay) oneCell() gpuCell {
	takes, _ := w.estimates()
	return gpuCell{name: w.cell, takes: takes, device: gpuNeed(w.s), host: w.host(1), measure: w.oneByOne}
}

// fourCell returns the cell of starts at the same time.
func (w *gpuWay) fourCell() gpuCell {
	_, takes := w.estimates()
	return gpuCell{name: w.cell + atOnceCell, takes: takes, device: together * gpuNeed(w.s), host: w.host(together), measure: w.atOnce}
}

// host returns how many bytes of the machine's memory n replicas take: the file in the page cache,
// and heaps.
func (w *gpuWay) host(n int64) int64 {
	switch w.name {
	case "plain": // each process has a heap of its own
		return hostBase + (1+n)*w.s.bytes
	case "heap": // in the heap of the zygote
		return hostBase + 2*w.s.bytes
	}
	return hostBase + w.s.bytes
}

// cells measures the starts of this turn.
func (w *gpuWay) cells(ctx context.Context) {
	begun := w.single && w.g.cells.run(ctx, w.oneCell())
	if w.several {
		begun = w.g.cells.run(ctx, w.fourCell()) || begun
	}
	// What the function keeps would slow the next cells.
	if begun && (w.name == "heap" || w.name == "parked" || w.name == "resident") {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		if _, err := w.b.Keys.Evict(ctx, w.spec.Function); err != nil {
			console.Progress("bench gpu: %s: %v", w.cell, err)
		}
	}
}

// estimates returns how long the cells take.
func (w *gpuWay) estimates() (one, four time.Duration) {
	t, n, bytes := w.g.times, 1+w.often(), w.s.bytes
	switch w.name {
	case "plain":
		return t.of(n, 0, 2*float64(n), bytes), t.of(2, 0, 6, bytes)
	case "cold":
		return t.of(n, 0, 0.5*float64(n), bytes), t.of(2, 0, 2, bytes)
	case "heap":
		return t.of(1, n, 1.5+0.2*float64(n), bytes), t.of(1, together, 2, bytes)
	case "parked":
		return t.of(1, 3*n, 0.5+0.1*float64(n), bytes), t.of(1, together, 1, bytes)
	}
	return t.of(1, n, 0.5+0.1*float64(n), bytes), t.of(1, together, 1, bytes)
}

// start starts a replica, or the process that replicas are compared with.
func (w *gpuWay) start(ctx context.Context) (starts.Started, error) {
	if w.path == "" {
		return w.b.Others[w.name](ctx)
	}
	w.mu.Lock()
	w.n++
	name := fmt.Sprintf("%s-%d", w.name, w.n)
	w.mu.Unlock()
	parts := w.said.expect(name)
	r, err := w.b.Start(ctx, func(ctx context.Context) (starts.Launched, error) {
		return w.b.Order(ctx, node.Order{Replica: name, Spec: w.spec, Device: w.g.at.ID})
	})
	if err != nil || !w.g.at.onGPU() { // on the CPU there are no parts
		return r, err
	}
	select {
	case r.Parts = <-parts:
	case <-time.After(time.Minute): // the figures of this start lack the parts
		console.Progress("bench gpu: %s: replica %s does not say how it got onto its device", w.cell, name)
	case <-ctx.Done():
	}
	return r, nil
}

// park waits until a child of the function is parked, if starts on this path claim one.
func (w *gpuWay) park(ctx context.Context) error {
	if !w.parks {
		return nil
	}
	for {
		if err := w.b.Keys.Warm(ctx, []node.Wanted{{Spec: w.spec, Key: true}}); err != nil {
			return err
		}
		for _, d := range w.b.Keys.Inventory().Devices {
			if len(d.ParkedFor) > 0 {
				return nil
			}
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("no child is parked: %w", context.Cause(ctx))
		}
	}
}

// oneByOne starts replicas, one after the other. It does not count the first start, because that
// start loads what the others share. After the last start, it measures the replica's memory.
func (w *gpuWay) oneByOne(ctx context.Context) error {
	samples := &gpuSamples{way: w}
	defer samples.report() // even after fewer starts than wanted
	none, err := w.memory(ctx, nil)
	if err != nil {
		return err
	}
	for i := range 1 + w.often() {
		before := none
		if i == w.often() { // the zygote is loaded, and no child is parked yet
			if before, err = w.memory(ctx, nil); err != nil {
				return err
			}
		}
		if err := w.park(ctx); err != nil {
			return err
		}
		r, err := w.start(ctx)
		if err != nil {
			return fmt.Errorf("start %d: %w", i+1, err)
		}
		if i == w.often() {
			after, err := w.memory(ctx, []starts.Started{r})
			if err != nil {
				r.End()
				return err
			}
			samples.memory(footprint{none.device, before.host}, after, 1)
		}
		r.End()
		if r.Path != w.path && !w.unmapped(r.Path) {
			return fmt.Errorf("start %d took path %q, want %q", i+1, r.Path, w.path)
		}
		if i > 0 {
			samples.add(r)
		}
	}
	return nil
}

// unmapped reports whether path is a fork from the heap although w measures forks with mapped
// parameters. That is not an error. It happens with small models: PyTorch imports modules during
// load, so the zygote's own memory is larger than the model, and the KeysManager counts the start
// as one from the heap.
func (w *gpuWay) unmapped(path string) bool {
	return w.name == "fork" && path == keysmanager.PathHeap
}

// atOnce starts several replicas at the same time, and measures their memory while all live.
func (w *gpuWay) atOnce(ctx context.Context) error {
	before, err := w.memory(ctx, nil)
	if err != nil {
		return err
	}
	if err := w.park(ctx); err != nil {
		return err
	}
	var all [together]starts.Started
	var failed [together]error
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() { all[i], failed[i] = w.start(ctx) })
	}
	wg.Wait()
	up := slices.DeleteFunc(slices.Clone(all[:]), func(r starts.Started) bool { return r.End == nil })
	defer func() {
		for _, r := range up {
			wg.Go(r.End)
		}
		wg.Wait()
	}()
	if err := errors.Join(failed[:]...); err != nil {
		return fmt.Errorf("%d of %d came up: %w", len(up), together, err)
	}
	after, err := w.memory(ctx, up)
	if err != nil {
		return err
	}
	samples := &gpuSamples{way: w, suffix: atOnceCell}
	for _, r := range up {
		samples.add(r)
	}
	samples.report()
	samples.memory(before, after, together)
	return nil
}
