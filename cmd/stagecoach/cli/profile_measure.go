package cli

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/profile"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// measure holds the function, and measures it with each quota, length and batch size.
func (f *profileFlags) measure(ctx context.Context, c *client.Client, path string, bodies []probe) (p profile.Profile, err error) {
	// The calls of a batch are sent at the same time.
	c.HTTP.Transport = &http.Transport{MaxIdleConnsPerHost: 4096, IdleConnTimeout: time.Minute}
	h, ctx, err := takeHold(ctx, c, f.name, path, f.api.namespace)
	if err != nil {
		return p, err
	}
	defer func() { err = errors.Join(cmpErr(context.Cause(ctx), err), h.letGo(ctx)) }()
	held, err := h.set(ctx, 0)
	if err != nil {
		return p, err
	}
	cells, err := f.cells(held, bodies)
	if err != nil {
		return p, err
	}
	p = profile.Profile{Version: profile.Version, Image: held.Image, Digest: held.Digest, Node: held.Node, Relative: f.rule.Relative}
	m := meter{c: c, url: "/function/" + invocationName(f.name, f.api.namespace), rule: f.rule, holder: h.order.Holder}
	if m.items, err = ProfileItems(ctx, c, path+f.api.query()); err != nil {
		return p, err
	}
	for i, cell := range cells {
		if i == 0 || cell.CPUMilli != cells[i-1].CPUMilli {
			if held, err = h.set(ctx, cell.CPUMilli); err != nil {
				return p, err
			}
		}
		m.replica, m.slots, m.largest, m.queue = held.Replica, held.Slots, held.Batch, held.Queue
		body := bodies[slices.IndexFunc(bodies, func(s probe) bool { return s.length == cell.Length })]
		begin := time.Now()
		pt, ok, err := m.point(ctx, cell, body)
		if err != nil {
			return p, fmt.Errorf("profile %s with %dm, batch %d: %w", f.name, cell.CPUMilli, cell.Batch, err)
		}
		what := fmt.Sprintf("profile: %d of %d: %dm, batch %d, length %d", i+1, len(cells), cell.CPUMilli, cell.Batch, cell.Length)
		if !ok {
			console.Progress("%s: left out: batches of this size did not form, calls are answered sooner than others come", what)
			continue
		}
		console.Progress("%s: %.4g ms ± %.2g %%, %d batches in %v", what, 1000*pt.Mean, 100*pt.Err/pt.Mean, pt.N, time.Since(begin).Round(100*time.Millisecond))
		if pt.Loose {
			console.Progress("%s: that is wider than %.3g %%; --most ends it", what, 100*f.rule.Relative)
		}
		p.Points = append(p.Points, pt)
	}
	p.At = time.Now().UTC()
	if len(p.Points) == 0 {
		return p, fmt.Errorf("profile %s: nothing could be measured", f.name)
	}
	return p, nil
}

// cells returns the cells that a measurement covers. Without flags, the function and its node
// suggest them.
func (f *profileFlags) cells(held provider.Held, bodies []probe) ([]profile.Cell, error) {
	cpu, batch := f.cpu, f.batch
	if len(cpu) == 0 {
		cpu = profile.Quotas(held.Limit, held.NodeCPU)
	}
	if len(batch) == 0 {
		batch = sizesUpTo(min(held.Batch, held.Queue))
	}
	for _, q := range cpu {
		if q < profile.MinCPU || held.NodeCPU > 0 && q > held.NodeCPU {
			return nil, fmt.Errorf("profile: --cpu %dm, want %dm to %dm, which node %q has", q, profile.MinCPU, held.NodeCPU, held.Node)
		}
	}
	for _, b := range batch {
		if b > held.Batch {
			return nil, fmt.Errorf("profile: --batch %d, want at most %d, the largest batch of %s (stagecoach.dev/batch)", b, held.Batch, f.name)
		}
		if b > held.Queue {
			return nil, fmt.Errorf("profile: --batch %d, want at most %d, as many calls as may wait for %s (stagecoach.dev/queue-limit)", b, held.Queue, f.name)
		}
	}
	var lengths []int
	for _, s := range bodies {
		lengths = append(lengths, s.length)
	}
	return profile.Cells(cpu, batch, lengths), nil
}

// sizesUpTo returns the powers of two below the largest batch, and that batch.
func sizesUpTo(largest int) (out []int) {
	for n := 1; n < largest; n *= 2 {
		out = append(out, n)
	}
	return append(out, max(largest, 1))
}

// meter measures one replica.
type meter struct {
	c       *client.Client
	url     string
	rule    profile.Rule
	holder  string // of the pin
	items   string // X-Items; empty: none
	replica string
	slots   int
	largest int // batch that it takes
	queue   int // calls that may wait
}

// fewForm is the number of rounds after which a cell is given up, if batches of its size have
// formed in less than a tenth of them.
const fewForm = 100

// point measures one cell. It returns false if batches of its size do not form. Calls while the
// quota settles do not count.
func (m *meter) point(ctx context.Context, cell profile.Cell, s probe) (profile.Point, bool, error) {
	var series profile.Series
	begin := time.Now()
	for rounds, settled := 0, false; ; {
		took, err := m.round(ctx, cell.Batch, s)
		if err != nil {
			return profile.Point{}, false, err
		}
		if !settled {
			if settled = time.Since(begin) >= settle; settled {
				begin = time.Now()
			}
			continue
		}
		rounds++
		for _, d := range took {
			series.Add(d)
		}
		tight := series.Enough(m.rule, time.Since(begin))
		hopeless := rounds >= fewForm && 10*series.Len() < rounds
		if !tight && !hopeless && series.Len() < m.rule.Most {
			continue
		}
		pt := series.Estimate()
		pt.Cell, pt.Loose = cell, pt.Err > m.rule.Relative*pt.Mean
		return pt, series.Len() >= profile.Least, nil
	}
}

// answered is the batch of a call, as its answer says.
type answered struct {
	batch   uint64
	size    int
	replica string
	took    time.Duration // on the replica
}

// inARow is how many batches of the largest size a round sends, one after the other. A round has
// fewer if the line has no room for them. Several batches in a row keep the replica busy most of
// the time, even if calls take long to reach it. An idle replica would recover its CPU quota, and
// the next batch would run too fast.
const inARow = 8

// calls returns how many calls a round has for batches of a size. One per slot goes ahead.
func (m *meter) calls(size int) int {
	switch size {
	case m.largest:
		return m.slots + size*max(min(inARow, m.queue/size), 1)
	case 1:
		return 1 // others would join it
	}
	return m.slots + size
}

// round sends calls at the same time, to form batches of a size. It returns how long the replica
// took for each batch of exactly this size, in the order of the batches, or nothing if no such
// batch formed. The calls include one more per slot (see calls), which keeps the slot busy while
// the others gather into a batch.
func (m *meter) round(ctx context.Context, size int, s probe) (took []time.Duration, err error) {
	calls := m.calls(size)
	all, errs := make([]answered, calls), make([]error, calls)
	var wg sync.WaitGroup
	for i := range calls {
		wg.Go(func() { all[i], errs[i] = m.call(ctx, s) })
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	slowest, members, sizes := map[uint64]time.Duration{}, map[uint64]int{}, map[uint64]int{}
	for _, a := range all {
		if a.replica != m.replica {
			return nil, fmt.Errorf("replica %s answered, want %s, which has the quota; was it lost?", a.replica, m.replica)
		}
		slowest[a.batch] = max(slowest[a.batch], a.took)
		members[a.batch]++
		sizes[a.batch] = a.size
	}
	for _, batch := range slices.Sorted(maps.Keys(slowest)) {
		if sizes[batch] == size && members[batch] == size { // no other call was in it
			took = append(took, slowest[batch])
		}
	}
	return took, nil
}

var batchForm = regexp.MustCompile(`\.batch;dur=([0-9.]+);desc="([0-9]+) of ([0-9]+) on ([^"]+)"`)

// call sends one call and reads where it ran.
func (m *meter) call(ctx context.Context, s probe) (answered, error) {
	header := http.Header{"Content-Type": {s.contentType}, "X-Batch-Timing": {m.holder}}
	if m.items != "" {
		header.Set("X-Items", m.items)
	}
	resp, err := m.c.Stream(ctx, http.MethodPost, m.url, header, bytes.NewReader(s.body))
	if err != nil {
		return answered{}, err
	}
	defer resp.Body.Close()
	if err := client.Refused(resp, "call"); err != nil {
		return answered{}, err
	}
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return answered{}, fmt.Errorf("call: %w", err)
	}
	parts := batchForm.FindStringSubmatch(strings.Join(resp.Header.Values("Server-Timing"), ", "))
	if parts == nil {
		return answered{}, errors.New("the answer does not say in which batch it ran: want a stage that is still held, not a function that speaks HTTP")
	}
	ms, err := strconv.ParseFloat(parts[1], 64)
	a := answered{replica: parts[4], took: max(time.Duration(ms*float64(time.Millisecond)), time.Microsecond)}
	if err == nil {
		a.batch, err = strconv.ParseUint(parts[2], 10, 64)
	}
	if err == nil {
		a.size, err = strconv.Atoi(parts[3])
	}
	if err != nil {
		return answered{}, fmt.Errorf("call: Server-Timing %q: %w", parts[0], err)
	}
	return a, nil
}
