package flow

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bus is an in-memory Bus. It answers each task with work, on its own goroutine; a nil reply is not
// sent.
type bus struct {
	work    func(t *task.Task) *task.Reply
	refuse  atomic.Pointer[error]
	workers sync.WaitGroup

	mu       sync.Mutex
	canceled []task.Key
	left     []string

	delivery sync.Mutex
	handler  func([]byte)
}

func (b *bus) Submit(_ string, msg []byte) error {
	if err := b.refuse.Load(); err != nil {
		return *err
	}
	msg = slices.Clone(msg)
	if kind, _ := wire.EnvelopeKind(msg); kind == wire.KindCancel {
		key, _, err := wire.DecodeCancel(msg)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.canceled = append(b.canceled, key)
		return err
	}
	if kind, _ := wire.EnvelopeKind(msg); kind == wire.KindLeave {
		request, function, err := wire.DecodeLeave(msg)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.left = append(b.left, request+" "+function)
		return err
	}
	t, err := wire.DecodeTask(msg)
	if err != nil {
		return err
	}
	b.workers.Go(func() {
		if r := b.work(t); r != nil {
			r.Key = t.Key
			b.reply(r)
		}
	})
	return nil
}

func (b *bus) reply(r *task.Reply) {
	b.delivery.Lock()
	defer b.delivery.Unlock()
	if b.handler != nil {
		b.handler(wire.AppendReply(nil, r))
	}
}

func (b *bus) Inbox(handler func([]byte)) (string, func(), error) {
	b.delivery.Lock()
	defer b.delivery.Unlock()
	b.handler = handler
	return "inbox", func() {
		b.delivery.Lock()
		defer b.delivery.Unlock()
		b.handler = nil
	}, nil
}

// graphs and loads are fakes of the registry and of the dispatcher.
type graphs map[pipeline.Key]pipeline.Pipeline

func (g graphs) Graph(key pipeline.Key) (pipeline.Pipeline, bool) { p, ok := g[key]; return p, ok }

type loads map[string]task.Load

func (l loads) Load(function pipeline.Key) task.Load { return l[function.String()] }

// rig is a coordinator with a fake bus.
type rig struct {
	*Coordinator
	t     testing.TB
	bus   *bus
	blobs string
	store *tensor.Dir
}

func newRig(t testing.TB, graph pipeline.Pipeline, l loads, work func(*task.Task) *task.Reply) *rig {
	t.Helper()
	r := &rig{t: t, bus: &bus{work: work}, blobs: filepath.Join(t.TempDir(), "blobs")}
	var err error
	if r.store, err = tensor.OpenDir(r.blobs, 64<<20); err != nil {
		t.Fatal(err)
	}
	r.Coordinator, err = New(Config{
		Bus: r.bus, Graphs: graphs{graph.Key(): graph}, Loads: l, Store: r.store,
		Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry(),
	})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// close closes the coordinator and checks that nothing is left.
func (r *rig) close() {
	r.t.Helper()
	if err := r.Close(context.Background()); err != nil {
		r.t.Error(err)
	}
	r.bus.workers.Wait()
	r.empty()
}

func (r *rig) empty() {
	r.t.Helper()
	for _, s := range r.shards {
		s.mu.Lock()
		if len(s.waiting) > 0 || s.core.Requests() > 0 {
			r.t.Errorf("%d requests and %d waiters are left", s.core.Requests(), len(s.waiting))
		}
		s.mu.Unlock()
	}
	if left, err := os.ReadDir(r.blobs); err != nil || len(left) > 0 {
		r.t.Errorf("blobs are left: %v, %v", left, err)
	}
}

func request(id string, items ...string) task.Request {
	return task.Request{ID: id, Target: "p.ns", Input: texts(items...)}
}

// add answers as evaluate expects of a stage.
func add(t *task.Task) *task.Reply {
	return &task.Reply{Replica: t.Stage + "-1", Output: texts(run(t.Stage, t.Input)...)}
}

// sinks formats an output as evaluate does.
func sinks(out tensor.Input) string {
	var s []string
	for _, p := range out {
		s = append(s, p.From+"="+show(p.Items))
	}
	return strings.Join(s, ";")
}

func TestInvokeWalksTheGraph(t *testing.T) {
	g := graph(t, "a>b,c;b>d;c*>d;d")
	r := newRig(t, g, nil, add)
	defer r.close()
	resp, terr := r.Invoke(t.Context(), request("1", "x", "y"))
	if terr != nil {
		t.Fatal(terr)
	}
	if got, want := sinks(resp.Output), evaluate(g, []string{"x", "y"}); got != want {
		t.Errorf("output %q, want %q", got, want)
	}
	if first, last := resp.Stages[0].Stage, resp.Stages[len(resp.Stages)-1].Stage; first != "a" || last != "d" {
		t.Errorf("stages ran from %s to %s, want from a to d", first, last)
	}
}

func TestInvokeRefusesUnknownAndFaultyTargets(t *testing.T) {
	g := graph(t, "a")
	full := loads{"a.ns": {Waiting: 5, Limit: 5}}
	broken := g
	broken.Faults = []pipeline.Fault{{Function: "a", Got: "x", Want: "y"}}
	for name, tc := range map[string]struct {
		graph  pipeline.Pipeline
		loads  loads
		target string
		status int
		cause  string
	}{
		"unknown":   {g, nil, "nosuch.ns", http.StatusNotFound, `no function or pipeline "nosuch"`},
		"faulty":    {broken, nil, "p.ns", http.StatusServiceUnavailable, "got x, want y"},
		"full line": {g, full, "p.ns", http.StatusTooManyRequests, "5 requests wait"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, tc.graph, tc.loads, add)
			defer r.close()
			req := request("1", strings.Repeat("large ", tensor.InlineLimit))
			req.Target = pipeline.ParseKey(tc.target).String()
			if _, terr := r.Invoke(t.Context(), req); terr == nil || terr.Status != tc.status || !strings.Contains(terr.Cause, tc.cause) {
				t.Errorf("got %+v, want %d and %q", terr, tc.status, tc.cause)
			}
			if got := testutil.ToFloat64(r.refused); (got == 1) != (tc.status == http.StatusTooManyRequests) {
				t.Errorf("%v refused with %d", got, tc.status)
			}
		})
	}
}

func TestTaskThatCannotBeSentIsUnavailable(t *testing.T) {
	r := newRig(t, graph(t, "a"), nil, add)
	defer r.close()
	down := errors.New("the bus is down")
	r.bus.refuse.Store(&down)
	_, terr := r.Invoke(t.Context(), request("1", "x"))
	if terr == nil || terr.Status != http.StatusServiceUnavailable || terr.RetryAfter == 0 || terr.Stage != "a" || !strings.Contains(terr.Cause, "the bus is down") {
		t.Errorf("got %+v", terr)
	}
}

func TestTaskOfLostReplicaIsTriedAgain(t *testing.T) {
	r := newRig(t, graph(t, "a"), nil, func(k *task.Task) *task.Reply {
		if k.Attempt < 3 {
			return &task.Reply{Code: task.ReplicaLost, Replica: "a-1", Message: "killed"}
		}
		return add(k)
	})
	defer r.close()
	if resp, terr := r.Invoke(t.Context(), request("1", "x")); terr != nil || len(resp.Stages) != 3 || resp.Stages[2].Attempt != 3 {
		t.Errorf("got %+v, %v", resp, terr)
	}
	if got := testutil.ToFloat64(r.retries); got != 2 {
		t.Errorf("%v retries counted, want 2", got)
	}
}

func TestDeadlinesEndRequestsInTheirOrder(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, graph(t, "a"), nil, func(*task.Task) *task.Reply { return nil })
		defer r.close()
		var wg sync.WaitGroup
		begin := time.Now()
		const n = 200 // enough for several requests per shard, with later deadlines first
		for i := range n {
			after := time.Duration(n-i) * time.Minute
			synctest.Wait()
			wg.Go(func() {
				req := request(fmt.Sprint(i), "x")
				req.Deadline = begin.Add(after)
				_, terr := r.Invoke(t.Context(), req)
				if terr == nil || terr.Status != http.StatusGatewayTimeout || terr.Stage != "a" {
					t.Errorf("got %+v, want 504 of stage a", terr)
				}
				if got := time.Since(begin); got != after {
					t.Errorf("a request with %v ended after %v", after, got)
				}
			})
		}
		wg.Wait()
		if got := len(r.bus.canceled); got != n {
			t.Errorf("%d tasks canceled, want %d", got, n)
		}
	})
}

func TestCanceledInvokeCancelsItsTasks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, graph(t, "a*"), nil, func(*task.Task) *task.Reply { return nil })
		defer r.close()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, terr := r.Invoke(ctx, request("1", "x", "y", "z"))
		if terr == nil || terr.Status != statusClientClosed {
			t.Errorf("got %+v, want %d", terr, statusClientClosed)
		}
		if n := len(r.bus.canceled); n != 3 {
			t.Errorf("%d tasks canceled, want 3", n)
		}
		if len(r.bus.left) != 1 || !strings.HasSuffix(r.bus.left[0], " a.ns") {
			t.Errorf("left %q, want the request's end told to a.ns", r.bus.left)
		}
	})
}

func TestCloseWaitsForRunningRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r := newRig(t, graph(t, "a"), nil, func(k *task.Task) *task.Reply { <-release; return add(k) })
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, terr := r.Invoke(t.Context(), request("1", "x")); terr != nil {
				t.Errorf("what ran when it was closed: %+v", terr)
			}
		})
		synctest.Wait()
		wg.Go(r.close)
		synctest.Wait()
		if _, terr := r.Invoke(t.Context(), request("2", "x")); terr == nil || terr.Status != http.StatusServiceUnavailable {
			t.Errorf("what came later: %+v, want 503", terr)
		}
		close(release)
		wg.Wait()
		if err := r.Close(t.Context()); err != nil {
			t.Errorf("closed twice: %v", err)
		}
	})
}

func TestCloseCutsOffSlowRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, graph(t, "a"), nil, func(*task.Task) *task.Reply { return nil })
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, terr := r.Invoke(t.Context(), request("1", "x")); terr == nil || terr.Status != http.StatusServiceUnavailable {
				t.Errorf("cut off with %+v, want 503", terr)
			}
		})
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := r.Close(ctx); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "1 requests were cut off") {
			t.Errorf("close: %v", err)
		}
		wg.Wait()
		r.empty()
		if n := len(r.bus.canceled); n != 1 {
			t.Errorf("%d tasks canceled, want 1", n)
		}
	})
}

func TestInFlightIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r := newRig(t, graph(t, "a"), nil, func(k *task.Task) *task.Reply { <-release; return add(k) })
		defer r.close()
		r.cfg.InFlight = 2
		var wg sync.WaitGroup
		for i := range 2 {
			wg.Go(func() {
				if _, terr := r.Invoke(t.Context(), request(fmt.Sprint(i), "x")); terr != nil {
					t.Errorf("request %d of 2: %+v", i, terr)
				}
			})
		}
		synctest.Wait()
		for range 2 { // a refused request takes no place
			_, terr := r.Invoke(t.Context(), request("more", strings.Repeat("large ", tensor.InlineLimit)))
			if terr == nil || terr.Status != http.StatusTooManyRequests || terr.RetryAfter < time.Second || !strings.Contains(terr.Cause, "2 requests are in flight") {
				t.Errorf("got %+v, want 429", terr)
			}
		}
		if got := testutil.ToFloat64(r.refused); got != 2 {
			t.Errorf("%v refused, want 2", got)
		}
		close(release)
		wg.Wait()
		if _, terr := r.Invoke(t.Context(), request("later", "x")); terr != nil {
			t.Errorf("once there is room: %+v", terr)
		}
	})
}

func TestRunsWithSameIDStaySeparate(t *testing.T) {
	var mu sync.Mutex
	seen := map[task.Key]bool{}
	r := newRig(t, graph(t, "a"), nil, func(k *task.Task) *task.Reply {
		mu.Lock()
		defer mu.Unlock()
		if seen[k.Key] {
			return nil // a dispatcher drops keys that it knows
		}
		seen[k.Key] = true
		return add(k)
	})
	defer r.close()
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for range 3 {
				req := request("same", "x")
				req.Deadline = time.Now().Add(time.Hour)
				if _, terr := r.Invoke(t.Context(), req); terr != nil {
					t.Error(terr)
				}
			}
		})
	}
	wg.Wait()
}

func TestConcurrentRequestsDespiteLossesAndCancels(t *testing.T) {
	g := graph(t, "a>b,c;b*>d;c>d;d")
	var n atomic.Uint32
	r := newRig(t, g, nil, func(k *task.Task) *task.Reply {
		if k.Attempt == 1 && n.Add(1)%7 == 0 {
			return &task.Reply{Code: task.ReplicaLost, Message: "killed"}
		}
		return add(k)
	})
	defer r.close()
	want := evaluate(g, []string{"x", "y", "z"})
	var wg sync.WaitGroup
	for i := range 3000 {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if i%10 == 0 {
				cancel()
			}
			req := request(fmt.Sprint(i), "x", "y", "z")
			req.Deadline = time.Now().Add(time.Hour)
			resp, terr := r.Invoke(ctx, req)
			switch {
			case terr != nil && (i%10 != 0 || terr.Status != statusClientClosed):
				t.Errorf("request %d: %+v", i, terr)
			case terr == nil && sinks(resp.Output) != want:
				t.Errorf("request %d: %q, want %q", i, sinks(resp.Output), want)
			}
		})
	}
	wg.Wait()
}

func TestRequestsRunOverNATS(t *testing.T) {
	srv, err := queue.StartServer(queue.ServerConfig{Dir: t.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer srv.Close()
	nc, err := srv.Connect("flow")
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	b := queue.NewBus(nc)
	for _, stage := range []string{"a", "b"} {
		stop, err := b.Tasks(stage+".ns", func(msg []byte, _ bool) {
			k, err := wire.DecodeTask(msg)
			if err != nil {
				t.Error(err)
				return
			}
			reply := add(k)
			reply.Key = k.Key
			if err := b.Reply(k.ReplyTo, wire.AppendReply(nil, reply)); err != nil {
				t.Error(err)
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
	}
	g := graph(t, "a>b;b")
	store, err := tensor.OpenDir(filepath.Join(t.TempDir(), "blobs"), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	c, err := New(Config{Bus: b, Graphs: graphs{pipeline.ParseKey("p.ns"): g}, Loads: loads{}, Store: store, Log: slog.New(slog.DiscardHandler), Metrics: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 200 {
		wg.Go(func() {
			resp, terr := c.Invoke(t.Context(), request(fmt.Sprint(i), "x"))
			if terr != nil || sinks(resp.Output) != evaluate(g, []string{"x"}) {
				t.Errorf("got %+v, %v", resp, terr)
			}
		})
	}
	wg.Wait()
	if err := c.Close(t.Context()); err != nil {
		t.Error(err)
	}
}

// BenchmarkInvoke measures the coordinator's part of a request with one stage: encoding, the core,
// and waking the caller.
func BenchmarkInvoke(b *testing.B) {
	r := newRig(b, graph(b, "a"), nil, nil)
	r.bus.work = add
	defer r.close()
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			if _, terr := r.Invoke(b.Context(), request("1", "x")); terr != nil {
				b.Fatal(terr)
			}
		}
	})
}
