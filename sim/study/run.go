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
		if c.setting.Then != nil {
			s = c.setting.Then(s)
		}
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

// one returns one run of a cell. It makes the run unless the store has it.
func (s *Study) one(ctx context.Context, c *cell, seed uint64, open sim.Opener) (run, error) {
	defer func() {
		if c.left.Add(-1) == 0 {
			c.model = nil // traces may be large
		}
	}()
	if s.Store == nil {
		return s.fresh(ctx, c, seed, open)
	}
	key, err := s.key(c, seed)
	if err != nil {
		return run{}, err
	}
	if r, ok := s.Store.get(key); ok {
		return r, nil
	}
	r, err := s.fresh(ctx, c, seed, open)
	if err != nil {
		return r, err
	}
	return r, s.Store.put(key, r)
}

// fresh makes one run of a cell.
func (s *Study) fresh(ctx context.Context, c *cell, seed uint64, open sim.Opener) (run, error) {
	if err := c.get(open); err != nil {
		return run{}, err
	}
	f, err := c.model.One(ctx, 0, seed)
	if err != nil {
		return run{}, fmt.Errorf("%s on %s with %v, seed %d: %w", c.contender.Name, c.setting.Name, c.knobs, seed, err)
	}
	return s.taken(c, f), nil
}

// run is the part of one run that a study keeps. [Store] writes it as JSON.
type run struct {
	Requests float64 `json:"requests"`
	Failed   float64 `json:"failed"` // share of the requests
	// latency in seconds, where a failed request counts with its timeout
	Mean float64 `json:"mean_s"`
	P50  float64 `json:"p50_s"`
	P75  float64 `json:"p75_s"`
	P99  float64 `json:"p99_s"`
	// mean latency of answered requests in seconds; the timeout if none was
	Answered    float64    `json:"answered_s"`
	InTime      []float64  `json:"in_time"`
	Seconds     float64    `json:"seconds"`
	GPUSeconds  float64    `json:"gpu_s"`
	CoreSeconds float64    `json:"core_s"`
	Stages      []stageRun `json:"stages"`
	Decisions   string     `json:"decisions"` // a hash: see sim.Figures
}

// stageRun is the part of one run that a study keeps of a stage.
type stageRun struct {
	Name   string             `json:"name"`
	Queue  float64            `json:"queue"`
	Wait   float64            `json:"wait_s"`
	CV     float64            `json:"cv"`
	Starts []sim.StartFigures `json:"starts,omitempty"`
}

// taken returns the part of a run's figures that a study keeps.
func (s *Study) taken(c *cell, f sim.Figures) run {
	p := &f.Pipelines[0]
	timeout := c.timeout.Seconds()
	r := run{
		Requests: p.Offered, Answered: p.Mean, P50: p.P50, P75: p.P75, P99: p.P99,
		Seconds: f.Seconds, GPUSeconds: f.DeviceSeconds, CoreSeconds: f.CoreSeconds, Decisions: f.Decisions,
	}
	if p.Answered == 0 {
		r.Answered, r.P50, r.P75, r.P99 = timeout, timeout, timeout, timeout
	}
	if p.Failed > 0 {
		r.Failed = p.Failed / p.Offered
		for q, to := range map[float64]*float64{0.5: &r.P50, 0.75: &r.P75, 0.99: &r.P99} {
			*to = timeout
			if d, ok := p.Quantile(q); ok {
				*to = d.Seconds()
			}
		}
	}
	r.Mean = r.Answered*(1-r.Failed) + timeout*r.Failed
	for _, x := range s.Multiples {
		r.InTime = append(r.InTime, p.Attained(time.Duration(x*float64(c.setting.Service))))
	}
	for i := range f.Stages {
		st := &f.Stages[i]
		r.Stages = append(r.Stages, stageRun{st.Name, st.Queue, st.Wait, st.CV, st.Starts})
	}
	return r
}

// gpus returns the mean number of GPUs.
func (r *run) gpus() float64 { return r.GPUSeconds / r.Seconds }
