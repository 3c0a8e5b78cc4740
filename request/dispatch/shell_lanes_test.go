package dispatch

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

var functionG, functionH = pipeline.ParseKey("g.ns"), pipeline.ParseKey("h.ns")

// variant returns the spec of a variant of f.
func variant(function pipeline.Key, revision uint64) Spec {
	return Spec{Function: function, Revision: revision, VariantOf: functionF, MaxReplicas: 2}
}

func (r *rig) ensure(spec Spec) {
	r.t.Helper()
	if err := r.shell.Ensure(spec); err != nil {
		r.t.Fatal(err)
	}
}

// publish publishes a plan in which the lanes have these shares.
func publish(s *Shell, version uint64, rank string, lanes ...string) {
	var l plan.Level
	for _, lane := range lanes {
		l.Shares = append(l.Shares, plan.Share{Lane: lane, Part: 1 / float64(len(lanes))})
	}
	l.Backups = []string{"f.ns", "g.ns", "h.ns"}
	t := plan.NewTable("f.ns", version, map[string]plan.Row{plan.FromClient: {Levels: []plan.Level{l}}})
	s.Publish(&plan.Plan{Wants: []plan.Want{{Function: "f.ns", Rank: rank}, {Function: "g.ns", Rank: rank}}, Tables: []plan.Table{t}})
}

// TestVariants follows a stage through its variants' lives.
func TestVariants(t *testing.T) {
	r := newRig(t, Spec{Revision: 1, QueueLimit: 10, MaxReplicas: 3})
	r.ensure(variant(functionG, 4))
	a := attach(t, r.shell, "f-1", 1, 1)
	b := attachTo(t, r.shell, functionG, "g-1", 4)
	publish(r.shell, 1, "", "g.ns")
	r.submit("a")
	id, _ := b.batch("a")
	if got, want := r.shell.Load(functionF), (task.Load{Running: 1, Servers: 2, Max: 5, Limit: 10}); got != want {
		t.Errorf("the stage's load is %+v, want %+v", got, want)
	}
	if got, want := r.shell.Load(functionG), (task.Load{Running: 1, Servers: 1, Max: 2, Limit: 1000}); got != want {
		t.Errorf("the variant's load is %+v, want %+v", got, want)
	}
	b.answer(id, 0)
	if reply := r.reply("a", task.OK, ""); reply.Replica != "g-1" || reply.Revision != 4 {
		t.Errorf("the reply is of %s, revision %d, want g-1, 4", reply.Replica, reply.Revision)
	}
	// The variant has a subject of its own.
	own := newTask("own", 0)
	own.Function = "g.ns"
	r.bus.sendTo("g.ns", wire.AppendTask(nil, own))
	id, _ = b.batch("own")
	b.answer(id, 0)
	r.reply("own", task.OK, "")
	// The stage's own function goes, and the stage lives on. Its running task ends as usual.
	publish(r.shell, 2, "", "f.ns")
	r.submit("b")
	id, _ = a.batch("b")
	r.submit("c")
	r.shell.Remove(functionF)
	onG, _ := b.batch("c")
	if !r.shell.Owns(functionF) {
		t.Error("the stage lost its owner with its own function")
	}
	drained := make(chan error, 1)
	go func() { drained <- r.shell.Drain(t.Context(), functionF, "f-1") }()
	a.answer(id, 0)
	r.reply("b", task.OK, "")
	if err := receive(t, drained, "drain"); err != nil {
		t.Error(err)
	}
	b.answer(onG, 0)
	r.reply("c", task.OK, "")
	r.submit("d")
	id, _ = b.batch("d")
	b.answer(id, 0)
	r.reply("d", task.OK, "")
	// Without variants too, nothing is left.
	r.shell.Remove(functionG)
	if r.shell.Owns(functionF) || r.shell.Owns(functionG) {
		t.Error("a stage without functions has an owner")
	}
}

// TestVariantMoves checks that a function which becomes a variant, or no longer is one, keeps its
// replicas and tasks.
func TestVariantMoves(t *testing.T) {
	r := newRig(t, Spec{Revision: 1})
	r.ensure(Spec{Function: functionG, Revision: 1})
	b := attachTo(t, r.shell, functionG, "g-1", 1)
	own := func(name string) []byte {
		in := newTask(name, 0)
		in.Function = "g.ns"
		return wire.AppendTask(nil, in)
	}
	r.bus.sendTo("g.ns", own("a"))
	id, _ := b.batch("a")
	r.bus.sendTo("g.ns", own("b"))
	r.ensure(variant(functionG, 1)) // it moves to f's owner
	b.answer(id, 0)
	r.reply("a", task.OK, "")
	id, _ = b.batch("b")
	publish(r.shell, 1, pipeline.RankFair, "g.ns")
	r.submit("c")
	// A variant of a variant serves no stage but its own, so h has nothing of g.
	r.ensure(Spec{Function: functionH, Revision: 1, VariantOf: functionG})
	if n := len(r.shell.function(functionH).owner.Load().functions); n != 1 {
		t.Errorf("the owner of a variant of a variant has %d functions, want 1", n)
	}
	r.ensure(Spec{Function: functionG, Revision: 1}) // and back: c stays with f, b goes on
	if o := r.shell.function(functionH).owner.Load(); o.stage != functionG {
		t.Errorf("h is of stage %s, want g.ns, which is a stage again", o.stage)
	}
	b.answer(id, 0)
	r.reply("b", task.OK, "")
	a := attach(t, r.shell, "f-1", 1, 1)
	id, _ = a.batch("c")
	a.answer(id, 0)
	r.reply("c", task.OK, "")
	if err := r.shell.Drain(t.Context(), functionG, "g-1"); err != nil {
		t.Error(err)
	}
}

// TestVariantWithoutStage checks that a variant serves its stage before the stage's own function is
// deployed.
func TestVariantWithoutStage(t *testing.T) {
	r := newRig(t, Spec{Revision: 1})
	r.shell.Remove(functionF)
	r.ensure(variant(functionG, 1))
	b := attachTo(t, r.shell, functionG, "g-1", 1)
	r.submit("a")
	id, _ := b.batch("a")
	near, _ := pair(t)
	if _, err := r.shell.Attach(t.Context(), functionF, "f-0", 1, near); err == nil {
		t.Error("a replica was attached to a function that is not deployed")
	}
	r.ensure(Spec{Function: functionF, Revision: 1})
	a := attach(t, r.shell, "f-1", 1, 1)
	r.submit("b") // there is no table, so the own lane gets it
	onF, _ := a.batch("b")
	a.answer(onF, 0)
	r.reply("b", task.OK, "")
	b.answer(id, 0)
	r.reply("a", task.OK, "")
}

// attachTo is attach for any function.
func attachTo(t testing.TB, s *Shell, function pipeline.Key, name string, revision uint64) *actor {
	t.Helper()
	near, far := pair(t)
	a := &actor{t, wire.NewConn(far)}
	a.write(wire.FrameHello, 0, wire.Hello{Oldest: 1, Newest: 1, PID: 1, Function: function.String(), Replica: name, Slots: 1, MaxBatch: 1}.Append(nil))
	if _, err := s.Attach(t.Context(), function, name, revision, near); err != nil {
		t.Fatalf("attach %s: %v", name, err)
	}
	a.read(wire.FrameWelcome)
	return a
}

// storm is a stage with three lanes under load, while its replicas are killed.
type storm struct {
	shell *Shell
	mu    sync.Mutex
	live  map[string]*victim
	// by key: how many replies came, and in how many batches the task was
	replies, runs map[task.Key]int
	pending       map[string]chan *task.Reply // by request
	replied       chan struct{}
	number        int
}

type victim struct {
	name     string
	function pipeline.Key
	conn     *wire.Conn
}

// serve attaches a replica that answers each call until its connection ends.
func (s *storm) serve(ctx context.Context, group *sync.WaitGroup, near, far wire.Socket, function pipeline.Key, revision uint64) {
	s.mu.Lock()
	s.number++
	v := &victim{fmt.Sprint(function.Name, "-", s.number), function, wire.NewConn(far)}
	s.mu.Unlock()
	hello := wire.Hello{Oldest: 1, Newest: 1, PID: 1, Function: function.String(), Replica: v.name, Slots: 2, MaxBatch: 1}.Append(nil)
	if v.conn.Write(wire.Frame{Type: wire.FrameHello, Payload: hello}) != nil {
		return
	}
	if _, err := s.shell.Attach(ctx, function, v.name, revision, near); err != nil {
		_ = v.conn.Close()
		return
	}
	s.mu.Lock()
	s.live[v.name] = v
	s.mu.Unlock()
	group.Go(func() {
		defer func() { _ = v.conn.Close() }()
		out := wire.Result{Output: tensor.Activation{text("done")}}.Append(nil)
		for {
			f, err := v.conn.Read()
			if err != nil {
				return
			}
			if f.Type != wire.FrameBatch {
				continue
			}
			b, err := wire.DecodeBatch(f.Payload)
			if err != nil {
				panic(err)
			}
			s.mu.Lock()
			for _, c := range b.Calls {
				s.runs[c.Key]++
			}
			s.mu.Unlock()
			if v.conn.Write(wire.Frame{Type: wire.FrameResult, Batch: f.Batch, Payload: out}) != nil {
				return
			}
		}
	})
}

// near counts a reply and passes it on.
func (s *storm) near(_ string, r *task.Reply) bool {
	s.mu.Lock()
	s.replies[r.Key]++
	ch := s.pending[r.Request]
	s.mu.Unlock()
	copied := *r
	ch <- &copied
	select {
	case s.replied <- struct{}{}:
	default:
	}
	return true
}

// call sends a task until it is answered for good, as a coordinator does.
func (s *storm) call(name, function string) error {
	ch := make(chan *task.Reply, 1)
	s.mu.Lock()
	s.pending[name] = ch
	s.mu.Unlock()
	for attempt := range uint8(250) {
		t := newTask(name, 0)
		t.Function, t.Attempt, t.App, t.Due = function, attempt+1, name[:1], time.Now().Add(time.Second)
		if !s.shell.Submit(t) {
			return fmt.Errorf("%s: %s has no owner", name, function)
		}
		select {
		case r := <-ch:
			switch {
			case r.Code == task.OK && r.Variant != r.Replica[:1]+".ns":
				return fmt.Errorf("%s: %s ran it, and the variant is %q", name, r.Replica, r.Variant)
			case r.Code == task.OK:
				return nil
			case r.Code != task.ReplicaLost && (r.Code != task.Unavailable || function == "f.ns"):
				return fmt.Errorf("%s: code %s, %s", name, codeNames[r.Code], r.Message)
			}
		case <-time.After(patience):
			return fmt.Errorf("%s: no reply to attempt %d", name, attempt+1)
		}
	}
	return fmt.Errorf("%s: too many attempts", name)
}

// TestStorm kills replicas, redeploys, removes and moves variants, and publishes tables, while
// clients send tasks to the stage and to a variant. Each attempt gets one reply and runs at most
// once, and no task is lost.
func TestStorm(t *testing.T) {
	store, err := tensor.OpenDir(t.TempDir(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	s := &storm{live: map[string]*victim{}, replies: map[task.Key]int{}, runs: map[task.Key]int{}, pending: map[string]chan *task.Reply{}, replied: make(chan struct{}, 4)}
	bus := &memoryBus{handlers: map[string]func([]byte, bool){}, replies: make(chan *task.Reply, 1)}
	s.shell, err = New(Config{Bus: bus, Store: store, Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry(), Near: s.near})
	if err != nil {
		t.Fatal(err)
	}
	revisions := map[pipeline.Key]uint64{functionF: 1, functionG: 1, functionH: 1}
	ensure := func(spec Spec) {
		t.Helper()
		if err := s.shell.Ensure(spec); err != nil {
			t.Error(err)
		}
	}
	ensure(Spec{Function: functionF, Revision: 1})
	ensure(variant(functionG, 1))
	ensure(variant(functionH, 1))
	var replicas, clients sync.WaitGroup
	serve := func(function pipeline.Key) {
		near, far := pair(t)
		s.serve(t.Context(), &replicas, near, far, function, revisions[function])
	}
	for function := range revisions {
		serve(function)
	}
	failed := make(chan error, 100)
	done := make(chan struct{})
	for c := range 6 {
		clients.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-done:
					return
				default:
				}
				function := "f.ns"
				if n%5 == 0 {
					function = "g.ns"
				}
				if err := s.call(fmt.Sprint(c, "-", n), function); err != nil {
					failed <- err
					return
				}
			}
		})
	}
	rnd := rand.New(rand.NewPCG(3, 4))
	functions := []pipeline.Key{functionF, functionG, functionH}
	ranks := []string{"", pipeline.RankFair, pipeline.RankLeastSlack}
	for round := range 300 {
		switch n := rnd.IntN(10); {
		case n < 4: // kill
			s.mu.Lock()
			for name, v := range s.live {
				_ = v.conn.Close()
				delete(s.live, name)
				break
			}
			s.mu.Unlock()
		case n < 6:
			publish(s.shell, uint64(round), ranks[rnd.IntN(3)], [][]string{{"f.ns"}, {"f.ns", "g.ns"}, {"g.ns", "h.ns"}, {"f.ns", "g.ns", "h.ns"}}[rnd.IntN(4)]...)
		case n < 7:
			revisions[functionG]++
			ensure(variant(functionG, revisions[functionG]))
		case n < 8: // removed while its replicas run, and deployed again
			s.shell.Remove(functionH)
			ensure(variant(functionH, revisions[functionH]))
		case n < 9: // no variant for a while
			ensure(Spec{Function: functionG, Revision: revisions[functionG]})
			ensure(variant(functionG, revisions[functionG]))
		default:
			s.shell.Remove(functionF)
			ensure(Spec{Function: functionF, Revision: 1})
		}
		serve(functions[rnd.IntN(3)])
		serve(functions[round%3])
		for range 4 {
			receive(t, s.replied, "reply")
		}
	}
	for function := range revisions {
		serve(function)
	}
	close(done)
	clients.Wait()
	s.shell.Close()
	replicas.Wait()
	close(failed)
	for err := range failed {
		t.Error(err)
	}
	for key, n := range s.replies {
		if n != 1 || s.runs[key] > 1 {
			t.Errorf("%v got %d replies and ran %d times", key, n, s.runs[key])
		}
	}
	if len(s.replies) < 1000 {
		t.Errorf("%d attempts, so the test proves little", len(s.replies))
	}
}
