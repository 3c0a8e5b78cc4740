package control

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a cluster of one node whose functions a test sets. observed and applied count calls.
type fake struct {
	mu      sync.Mutex
	s       plan.Snapshot
	observe func(ctx context.Context) error
	apply   func(plan.Plan) error
	applied []plan.Plan
	at      []time.Time // of observations
}

func newFake(functions ...plan.Function) *fake {
	return &fake{s: plan.Snapshot{Nodes: []plan.Node{{Name: "n", Memory: 1 << 30}}, Functions: functions}}
}

func (f *fake) Observe(ctx context.Context) (plan.Snapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.at = append(f.at, time.Now())
	if f.observe != nil {
		if err := f.observe(ctx); err != nil {
			return plan.Snapshot{}, err
		}
	}
	f.s.Rev++
	f.s.At = time.Now().Round(0)
	return f.s, nil
}

func (f *fake) Apply(_ context.Context, p plan.Plan) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.apply != nil {
		if err := f.apply(p); err != nil {
			return err
		}
	}
	f.applied = append(f.applied, p)
	return nil
}

func (f *fake) counts() (observed, applied int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.at), len(f.applied)
}

// gap returns the time between the i-th observation and the previous one.
func (f *fake) gap(i int) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.at[i].Sub(f.at[i-1])
}

func (f *fake) last() plan.Plan {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.applied[len(f.applied)-1]
}

// lines is a log for tests to read.
type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// start runs a loop in a synctest bubble. stop ends it and waits for it.
func start(t *testing.T, f *fake, change func(*Loop)) (l *Loop, log *lines, stop func()) {
	t.Helper()
	log = &lines{}
	l, err := New(f, f, Config{}, slog.New(slog.NewTextHandler(log, nil)), prometheus.NewRegistry())
	if err != nil {
		t.Fatal(err)
	}
	if change != nil {
		change(l)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	return l, log, func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v, want canceled", err)
		}
	}
}

// counted reads a counter through a new registry.
func counted(t *testing.T, c prometheus.Counter) float64 {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(c)
	families, err := r.Gather()
	if err != nil || len(families) != 1 {
		t.Fatalf("%v, %v", families, err)
	}
	return families[0].GetMetric()[0].GetCounter().GetValue()
}

func function(name string) plan.Function {
	return plan.Function{Name: name, Revision: 1, Min: 1, Max: 5, Slots: 1, Batch: 1}
}

func TestTicksEverySecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(function("f"))
		l, _, stop := start(t, f, nil)
		time.Sleep(time.Hour + time.Millisecond) // the bubble's clock
		stop()
		if _, applied := f.counts(); applied != 3601 {
			t.Errorf("%d plans applied in an hour, want 3601", applied)
		}
		if got := counted(t, l.ticks.WithLabelValues("applied")); got != 3601 {
			t.Errorf("%v ticks counted, want 3601", got)
		}
		s, p := l.Last()
		if s.Rev != 3601 || p.Rev != 3601 || len(p.Wants) != 1 || len(p.Wants[0].Slots) != 1 || p.Wants[0].Why == "" {
			t.Errorf("last %d, %+v", s.Rev, p)
		}
	})
}

func TestPokesAreOneEarlyTick(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(function("f"))
		l, _, stop := start(t, f, nil)
		defer stop()
		synctest.Wait()
		time.Sleep(500 * time.Millisecond)
		for range 1000 {
			l.Poke()
		}
		time.Sleep(20 * time.Millisecond)
		synctest.Wait()
		if n, _ := f.counts(); n < 2 || n > 3 { // 3 if pokes came while the early tick ran
			t.Fatalf("%d observations, want 2 or 3", n)
		}
		if got := f.gap(1); got < 500*time.Millisecond || got > 501*time.Millisecond {
			t.Errorf("the early tick came %v after the first, want it at once, when the last one was long ago", got)
		}
		n, _ := f.counts()
		for range 100 { // one poke per millisecond
			l.Poke()
			time.Sleep(time.Millisecond)
		}
		synctest.Wait()
		m, _ := f.counts()
		if m < n+5 || m > n+6 {
			t.Errorf("%d ticks in 100ms of pokes, want one each 20ms", m-n)
		}
		for i := n; i < m; i++ {
			if gap := f.gap(i); gap < 20*time.Millisecond {
				t.Errorf("%v between ticks, want at least 20ms", gap)
			}
		}
		n = m
		time.Sleep(10 * time.Second)
		if m, _ := f.counts(); m < n+9 || m > n+12 {
			t.Errorf("%d observations ten seconds later, want the usual pace", m-n)
		}
	})
}

// counter counts its calls per function.
type counter struct{ fail string }

func (c *counter) Allocate(_ plan.Snapshot, d plan.Domain, m map[string]int) (plan.Alloc, map[string]int, error) {
	if strings.HasPrefix(d.Functions[0], cmp.Or(c.fail, "-")) {
		panic("no answer")
	}
	next := map[string]int{}
	var a plan.Alloc
	for _, n := range d.Functions {
		next[n] = m[n] + 1
		a = append(a, plan.Line{Function: n, Count: next[n], Why: fmt.Sprint(next)})
	}
	return a, next, nil
}

func (c *counter) Merge(a, b map[string]int) map[string]int {
	m := map[string]int{}
	for _, from := range []map[string]int{a, b} {
		for k, v := range from {
			m[k] = v
		}
	}
	return m
}

func slots(p plan.Plan) string {
	var out []string
	for _, w := range p.Wants {
		out = append(out, fmt.Sprintf("%s=%d", w.Function, len(w.Slots)))
	}
	return strings.Join(out, " ")
}

func TestOnlyAnAppliedPlanIsRemembered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(function("f"))
		refuse := true
		f.apply = func(plan.Plan) error {
			if refuse {
				return errors.New("the node is away")
			}
			return nil
		}
		l, log, stop := start(t, f, func(l *Loop) { l.policies = policy.WithAllocator(l.policies, "counter", &counter{}) })
		time.Sleep(3500 * time.Millisecond)
		f.mu.Lock()
		refuse = false
		f.mu.Unlock()
		time.Sleep(time.Second)
		stop()
		if got := slots(f.last()); got != "f=1" {
			t.Errorf("the first applied plan wants %s, want f=1: refused ones leave no trace", got)
		}
		if got := counted(t, l.ticks.WithLabelValues("failed")); got != 4 {
			t.Errorf("%v failed ticks counted, want 4", got)
		}
		if n := strings.Count(log.String(), "the node is away"); n != 1 {
			t.Errorf("said %d times, want once: %s", n, log)
		}
		if !strings.Contains(log.String(), "works again") {
			t.Errorf("no word that it is over: %s", log)
		}
	})
}

func TestAPanicHoldsItsDomainOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bad := function("bad")
		bad.Replicas = []plan.Replica{{Name: "b1", Revision: 1, Node: "n", State: plan.Ready}, {Name: "b2", Revision: 1, Node: "n", State: plan.Ready}}
		f := newFake(bad, function("good"))
		l, log, stop := start(t, f, func(l *Loop) { l.policies = policy.WithAllocator(l.policies, "counter", &counter{fail: "bad"}) })
		time.Sleep(2500 * time.Millisecond)
		stop()
		p := f.last()
		if got := slots(p); got != "bad=2 good=3" {
			t.Errorf("%s, want bad=2 good=3", got)
		}
		if !strings.Contains(p.Wants[0].Why, "held: policy panicked: no answer") {
			t.Errorf("reason %q", p.Wants[0].Why)
		}
		if n := strings.Count(log.String(), "keeps its replicas"); n != 1 {
			t.Errorf("said %d times, want once, whatever addresses the stack has: %s", n, log)
		}
		if got, want := l.Trouble(), `domain of "bad" keeps its replicas: policy panicked: no answer`; got != want {
			t.Errorf("trouble %q, want %q: a line without a stack", got, want)
		}
		if got := counted(t, l.held); got != 3 {
			t.Errorf("%v held domains counted, want 3", got)
		}
		if !strings.Contains(log.String(), `domain of \"bad\" keeps its replicas`) {
			t.Errorf("log %s", log)
		}
	})
}

// TestManyPanicsAreAFewLines checks a fault that affects all domains.
func TestManyPanicsAreAFewLines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		for i := range 30 {
			f.s.Functions = append(f.s.Functions, function(fmt.Sprintf("bad%02d", i)))
		}
		l, log, stop := start(t, f, func(l *Loop) { l.policies = policy.WithAllocator(l.policies, "counter", &counter{fail: "bad"}) })
		time.Sleep(1500 * time.Millisecond)
		stop()
		if got := l.Trouble(); strings.Count(got, "keeps its replicas") != stayedTold || !strings.HasSuffix(got, "; and so do 27 more domains") {
			t.Errorf("trouble %q", got)
		}
		if got := len(log.String()); got > 30<<10 {
			t.Errorf("%d bytes logged of 30 domains", got)
		}
	})
}

func TestMergedDomainsRememberBoth(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(function("a"), function("b"))
		_, _, stop := start(t, f, func(l *Loop) { l.policies = policy.WithAllocator(l.policies, "counter", &counter{}) })
		time.Sleep(1500 * time.Millisecond)
		f.mu.Lock()
		f.s.Pipelines = []plan.Pipeline{{Name: "p", Stages: []string{"a", "b"}}}
		f.mu.Unlock()
		time.Sleep(time.Second)
		f.mu.Lock()
		f.s.Pipelines = nil
		f.mu.Unlock()
		time.Sleep(time.Second)
		stop()
		if got := slots(f.last()); got != "a=4 b=4" {
			t.Errorf("%s, want a=4 b=4: four ticks, whatever the domains were", got)
		}
	})
}

// bad places more replicas than requested.
type bad struct{}

func (bad) Place(s plan.Snapshot, a plan.Alloc) ([]plan.Want, error) {
	var wants []plan.Want
	for _, l := range a {
		wants = append(wants, plan.Want{Function: l.Function, Revision: 99})
	}
	return wants, nil
}

func TestAnInvalidPlanIsNotApplied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(function("f"))
		l, log, stop := start(t, f, func(l *Loop) { l.policies = policy.WithPlacer(l.policies, "bad", bad{}) })
		time.Sleep(1500 * time.Millisecond)
		stop()
		if _, n := f.counts(); n != 0 {
			t.Errorf("%d plans applied, want none", n)
		}
		if got := counted(t, l.ticks.WithLabelValues("invalid")); got != 2 {
			t.Errorf("%v invalid ticks, want 2", got)
		}
		if !strings.Contains(log.String(), "revision 99, want 1") {
			t.Errorf("log %s", log)
		}
	})
}

func TestAHangingObserverIsCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake(function("f"))
		first := true
		f.observe = func(ctx context.Context) error {
			if first {
				first = false
				<-ctx.Done()
				return ctx.Err()
			}
			return nil
		}
		_, log, stop := start(t, f, nil)
		time.Sleep(7500 * time.Millisecond)
		stop()
		if _, n := f.counts(); n != 2 {
			t.Errorf("%d plans applied, want 2: after 6s and 7s", n)
		}
		if !strings.Contains(log.String(), "observe: context deadline exceeded") {
			t.Errorf("log %s", log)
		}
	})
}

func TestUnknownPoliciesAreNamed(t *testing.T) {
	_, err := New(nil, nil, Config{Policies: policy.Names{Allocator: "magic", Placer: "first-fit", Warmer: "sauna"}}, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
	if err == nil || !strings.Contains(err.Error(), `allocator "magic", want one of `) || !strings.Contains(err.Error(), `warmer "sauna", want one of key-stages`) {
		t.Errorf("%v", err)
	}
}
