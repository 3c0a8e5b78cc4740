package study

import (
	"context"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// Progress says how far the runs of a step are.
type Progress struct {
	Step       string // "tune", "evaluate"
	Runs, Done int
}

// cell is a contender on a setting with a configuration. It has one model, and one run per seed.
type cell struct {
	setting   *Setting
	contender *Contender
	knobs     []float64
	train     bool
	seed      uint64 // of its first run

	once    sync.Once
	model   *sim.Model
	timeout time.Duration
	err     error
	left    atomic.Int64 // number of runs that still need the model
}

// get makes the model on the first call.
func (c *cell) get(open sim.Opener) error {
	c.once.Do(func() {
		s := c.contender.Apply(c.setting.Scenario(c.train), slices.Clone(c.knobs))
		if len(s.Pipelines) != 1 || len(s.Policies) != 1 || s.Pipelines[0].Timeout <= 0 {
			c.err = fmt.Errorf("%d pipelines and %d policies, want one of each, and a timeout", len(s.Pipelines), len(s.Policies))
			return
		}
		c.timeout, s.Seed = s.Pipelines[0].Timeout, c.seed
		c.model, c.err = s.Model(open)
	})
	if c.err != nil {
		return fmt.Errorf("%s on %s with %v: %w", c.contender.Name, c.setting.Name, c.knobs, c.err)
	}
	return nil
}

// simulate makes the runs of all cells and returns them by cell, then seed. It makes one run per
// processor at a time. The order of the runs does not change the results.
func (s *Study) simulate(ctx context.Context, step string, cells []*cell, seeds Seeds, open sim.Opener, report func(Progress)) ([][]run, error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	all := make([][]run, len(cells))
	for i, c := range cells {
		all[i] = make([]run, seeds.N)
		c.seed = seeds.First
		c.left.Store(int64(seeds.N))
	}
	total := len(cells) * seeds.N
	var next atomic.Int64
	var mu sync.Mutex
	seen := Progress{Step: step, Runs: total}
	var group sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), total) {
		group.Go(func() {
			for {
				i := int(next.Add(1)) - 1
				if i >= total || ctx.Err() != nil {
					return
				}
				c, k := cells[i/seeds.N], i%seeds.N
				r, err := s.one(ctx, c, seeds.First+uint64(k), open)
				if err != nil {
					stop(err)
					return
				}
				all[i/seeds.N][k] = r
				mu.Lock()
				if seen.Done++; report != nil {
					report(seen)
				}
				mu.Unlock()
			}
		})
	}
	group.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, fmt.Errorf("%s: %w", step, err)
	}
	return all, nil
}

// one makes one run of a cell.
func (s *Study) one(ctx context.Context, c *cell, seed uint64, open sim.Opener) (run, error) {
	if err := c.get(open); err != nil {
		return run{}, err
	}
	f, err := c.model.One(ctx, 0, seed)
	if err != nil {
		return run{}, fmt.Errorf("%s on %s with %v, seed %d: %w", c.contender.Name, c.setting.Name, c.knobs, seed, err)
	}
	if c.left.Add(-1) == 0 {
		c.model = nil // traces may be large
	}
	return s.taken(c, f), nil
}

// run is the part of one run that a study keeps.
type run struct {
	requests, failed    float64 // failed is a share of the requests
	mean, p50, p75, p99 float64 // latency in seconds, where a failed request counts with its timeout
	// mean latency of answered requests in seconds; the timeout if none was
	answered    float64
	inTime      []float64
	seconds     float64
	gpuSeconds  float64
	coreSeconds float64
	stages      []sim.StageFigures
	decisions   string // a hash: see sim.Figures
}

// taken returns the part of a run's figures that a study keeps.
func (s *Study) taken(c *cell, f sim.Figures) run {
	p := &f.Pipelines[0]
	timeout := c.timeout.Seconds()
	r := run{
		requests: p.Offered, answered: p.Mean, p50: p.P50, p75: p.P75, p99: p.P99,
		seconds: f.Seconds, gpuSeconds: f.DeviceSeconds, coreSeconds: f.CoreSeconds, stages: f.Stages,
		decisions: f.Decisions,
	}
	if p.Answered == 0 {
		r.answered, r.p50, r.p75, r.p99 = timeout, timeout, timeout, timeout
	}
	if p.Failed > 0 {
		r.failed = p.Failed / p.Offered
		for q, to := range map[float64]*float64{0.5: &r.p50, 0.75: &r.p75, 0.99: &r.p99} {
			*to = timeout
			if d, ok := p.Quantile(q); ok {
				*to = d.Seconds()
			}
		}
	}
	r.mean = r.answered*(1-r.failed) + timeout*r.failed
	for _, x := range s.Multiples {
		r.inTime = append(r.inTime, p.Attained(time.Duration(x*float64(c.setting.Service))))
	}
	return r
}

// gpus returns the mean number of GPUs.
func (r *run) gpus() float64 { return r.gpuSeconds / r.seconds }
