package resources

import (
	"fmt"
	"sync"
	"time"
)

// Usage returns the latest measurement; the zero Usage: not measured yet.
func (c *Cgroup) Usage() Usage {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.latest
}

// Info returns the usage for an inventory.
func (c *Cgroup) Info() *Usage {
	if c == nil {
		return nil
	}
	u := c.Usage()
	if u.At.IsZero() {
		return nil
	}
	return &u
}

// measure measures the group, unless the latest measurement is younger than measureEvery. news says
// what the group's limits have prevented since the previous measurement; empty: nothing.
func (c *Cgroup) measure(now time.Time) (news string, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now.Sub(c.latest.At) < measureEvery {
		return "", nil
	}
	u, err := c.group.Usage()
	if err != nil {
		return "", err
	}
	before := c.latest
	if before.At.IsZero() {
		before.At = c.began
	}
	c.latest = Usage{GroupUsage: u, At: now}
	if d := now.Sub(before.At); d > 0 {
		c.latest.CPUMilli = max(0, 1000*(u.CPU-before.CPU).Seconds()/d.Seconds())
	}
	if n := u.ForksRefused; n > 0 && c.told.ForksRefused == 0 {
		news = fmt.Sprintf("a process was not started: the limit is %d processes and threads", c.limits.PIDs)
	}
	if u.OOMKills > c.told.OOMKills {
		news = "a process was killed: " + c.outOfMemory()
	}
	c.told = u
	return news, nil
}

// Measure measures the cgroups of all processes that run, for the inventory, and logs limits that
// were hit. look returns the cgroups, and the functions of each worker's replicas, by the worker's
// cgroup (guests). Measure skips a cgroup that is being removed. It does nothing while another call
// runs.
func (p *Pool) Measure(look func() (live []*Cgroup, guests map[*Cgroup][]string)) {
	if p.cfg.Groups == nil || !p.measuring.TryLock() {
		return
	}
	defer p.measuring.Unlock()
	now := time.Now()
	live, guests := look()
	for _, c := range live {
		news, err := c.measure(now)
		switch {
		case err != nil:
			p.cfg.Log.Debug("usage cannot be measured", "name", c.name, "error", err)
		case news != "":
			p.cfg.Log.Warn("a limit was hit", "function", c.function, "name", c.name, "what", news)
			p.cfg.Output(c.function, c.name, "stderr", "stagecoach: "+news)
		}
	}
	for c, functions := range guests {
		p.totals.share(c, functions)
	}
}

// Used is the usage of a function's replicas.
type Used struct {
	CPU, Throttled time.Duration
	Memory         int64
}

// Used returns the usage of each function's replicas, as of the latest measurement; live and guests
// as for Measure.
func (p *Pool) Used(live []*Cgroup, guests map[*Cgroup][]string) map[string]Used {
	all := map[string]Used{}
	p.totals.mu.Lock()
	defer p.totals.mu.Unlock()
	for name, f := range p.totals.of {
		all[name] = Used{CPU: f.cpu, Throttled: f.throttled}
	}
	for _, c := range live {
		if f, ok := all[c.function]; ok && c.replica && !c.done {
			u := c.Usage()
			all[c.function] = Used{f.CPU + u.CPU, f.Throttled + u.Throttled, f.Memory + u.Memory}
		}
	}
	for c, functions := range guests {
		part := c.Usage().Memory / int64(len(functions))
		for _, name := range functions {
			if f, ok := all[name]; ok {
				f.Memory += part
				all[name] = f
			}
		}
	}
	return all
}

// Began notes that a function has one more replica in a worker.
func (p *Pool) Began(function string) { p.totals.began(function) }

// Left notes that a replica of the function in a worker has ended.
func (p *Pool) Left(function string) { p.totals.left(function) }

// Forget drops a function's usage, once its last replica has ended.
func (p *Pool) Forget(function string) { p.totals.forget(function) }

// totals adds up the usage of replicas that have ended, by function. The zero value is ready.
type totals struct {
	mu sync.Mutex
	of map[string]*total
}

type total struct {
	cpu, throttled time.Duration
	live           int  // replicas that have not ended
	gone           bool // not deployed any more: forgotten with its last replica
}

// began notes that a function has one more replica.
func (t *totals) began(function string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.of == nil {
		t.of = map[string]*total{}
	}
	f := t.of[function]
	if f == nil {
		f = &total{}
		t.of[function] = f
	}
	f.live++
	f.gone = false
}

// ended adds the usage of a replica that has ended.
func (t *totals) ended(e *Cgroup, u GroupUsage) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if e.replica && !e.done {
		e.done = true
		t.end(e.function, u)
	}
}

// left notes that a replica in a worker has ended.
func (t *totals) left(function string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end(function, GroupUsage{})
}

func (t *totals) end(function string, u GroupUsage) {
	if f := t.of[function]; f != nil {
		f.cpu += u.CPU
		f.throttled += u.Throttled
		f.live--
		t.tidy(function, f)
	}
}

// share charges a worker's usage since the last call to its replicas' functions, in equal parts per
// replica.
func (t *totals) share(e *Cgroup, functions []string) {
	u, n := e.Usage().GroupUsage, time.Duration(len(functions))
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, name := range functions {
		if f := t.of[name]; f != nil {
			f.cpu += (u.CPU - e.shared.CPU) / n
			f.throttled += (u.Throttled - e.shared.Throttled) / n
		}
	}
	e.shared = u
}

// forget drops a function, once its last replica has ended.
func (t *totals) forget(function string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if f := t.of[function]; f != nil {
		f.gone = true
		t.tidy(function, f)
	}
}

func (t *totals) tidy(function string, f *total) {
	if f.gone && f.live == 0 {
		delete(t.of, function)
	}
}
