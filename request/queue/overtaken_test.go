package queue

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
)

// told is what the work of two processes on one journal has done, by process.
type told struct {
	mu        sync.Mutex
	runs      []string
	callbacks []string
}

// zombies are two processes with the same journal. The first has begun to run a record, and the
// second has found it.
type zombies struct {
	first, second         *Journal
	stopFirst, stopSecond func()
	goOn                  map[string]chan struct{} // lets the run of a process end
	told
}

func newZombies(t *testing.T) *zombies {
	of := natstest.Start(t, 1)
	_, nc := openCluster(t, of, 0)
	z := &zombies{goOn: map[string]chan struct{}{"first": make(chan struct{}), "second": make(chan struct{})}}
	of2 := func(name string) func(context.Context, Record) End {
		return func(ctx context.Context, r Record) End {
			z.mu.Lock()
			defer z.mu.Unlock()
			if r.Kind == Callback {
				z.callbacks = append(z.callbacks, name+": "+string(r.Data))
				return End{}
			}
			z.runs = append(z.runs, name)
			z.mu.Unlock()
			select {
			case <-z.goOn[name]:
			case <-ctx.Done():
			}
			z.mu.Lock()
			if ctx.Err() != nil {
				return End{Err: ctx.Err()}
			}
			return End{Callback: []byte("result of " + name), To: "host"}
		}
	}
	z.first = openJournal(t, nc, JournalConfig{})
	z.stopFirst = work(t, z.first, of2("first"))
	enter(t, z.first, "f", "a", "x")
	z.until(t, "the first run", 1, 0)
	_, nc2 := openCluster(t, of, 0)
	z.second = openJournal(t, nc2, JournalConfig{})
	z.stopSecond = work(t, z.second, of2("second"))
	z.until(t, "the second run", 2, 0)
	return z
}

func (z *zombies) until(t *testing.T, what string, runs, callbacks int) {
	t.Helper()
	until(t, what, func() bool {
		z.mu.Lock()
		defer z.mu.Unlock()
		return len(z.runs) >= runs && len(z.callbacks) >= callbacks
	})
}

// TestOvertakenProcessStoresNothing has a process end its work on a record after another process
// has done the same. The result is delivered once.
func TestOvertakenProcessStoresNothing(t *testing.T) {
	z := newZombies(t)
	close(z.goOn["second"])
	z.until(t, "the callback", 2, 1)
	until(t, "the second journal to be empty", func() bool { return len(z.second.Stats().Pending) == 0 })
	close(z.goOn["first"])
	until(t, "the first journal to be empty", func() bool { return len(z.first.Stats().Pending) == 0 })
	empty(t, z.first)
	z.mu.Lock()
	defer z.mu.Unlock()
	if len(z.callbacks) != 1 || z.callbacks[0] != "second: result of second" {
		t.Errorf("callbacks %q, want one, of the second process", z.callbacks)
	}
}

// TestResultOfAnOvertakenProcessIsDelivered has a process end a run before the next process does.
// Then it stops. The next process delivers its result, and not its own.
func TestResultOfAnOvertakenProcessIsDelivered(t *testing.T) {
	z := newZombies(t)
	z.first.mu.Lock()
	z.first.lines.kinds[Callback].window = 0 // so that it delivers nothing
	z.first.mu.Unlock()
	close(z.goOn["first"])
	until(t, "the result to be stored", func() bool {
		z.first.mu.Lock()
		defer z.first.mu.Unlock()
		ln := z.first.lines.of[lineKey{Callback, "host"}]
		return ln != nil && len(ln.ready) > 0
	})
	z.stopFirst()
	close(z.goOn["second"])
	z.until(t, "the callback", 2, 1)
	until(t, "the second journal to be empty", func() bool { return len(z.second.Stats().Pending) == 0 })
	z.mu.Lock()
	defer z.mu.Unlock()
	if len(z.callbacks) != 1 || z.callbacks[0] != "second: result of first" {
		t.Errorf("callbacks %q, want the first process's result, once", z.callbacks)
	}
}

// TestCallsBetweenProcesses checks answers in parts, callers that go, and names without a server.
func TestCallsBetweenProcesses(t *testing.T) {
	nc := start(t, t.TempDir())
	b := NewBus(nc)
	gone := make(chan struct{})
	stop, err := b.Serve("a b", func(ctx context.Context, msg []byte, send func([]byte) error) error {
		switch string(msg) {
		case "endless":
			_ = send([]byte("first"))
			<-ctx.Done()
			close(gone)
			return nil
		case "broken":
			_ = send([]byte("first"))
			return errors.New("it broke\nin the middle")
		}
		for range 3 {
			_ = send(msg)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	var got []byte
	all := func(part []byte) error { got = append(got, part...); return nil }
	if err := b.Call(t.Context(), "a b", []byte("xy"), all); err != nil || string(got) != "xyxyxy" {
		t.Errorf("got %q, %v; want three parts", got, err)
	}
	if err := b.Call(t.Context(), "a b", []byte("broken"), all); err == nil || !strings.Contains(err.Error(), "it broke in the middle") {
		t.Errorf("a call whose server fails: %v, want the server's error", err)
	}
	if err := b.Call(t.Context(), "c", nil, all); !errors.Is(err, ErrNobody) {
		t.Errorf("nobody's name: %v, want ErrNobody", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if err := b.Call(ctx, "a b", []byte("endless"), func([]byte) error { cancel(); return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that goes: %v", err)
	}
	<-gone
	stop()
	if err := b.Call(t.Context(), "a b", nil, all); !errors.Is(err, ErrNobody) {
		t.Errorf("after stop: %v, want ErrNobody", err)
	}
}

// TestStopAnswersCallsOnTheirWay stops a server while many calls come. Each of them is answered, or
// nobody has got it.
func TestStopAnswersCallsOnTheirWay(t *testing.T) {
	nc := start(t, t.TempDir())
	b := NewBus(nc)
	for range 10 {
		var called, callers sync.WaitGroup
		stop, err := b.Serve("name", func(_ context.Context, msg []byte, send func([]byte) error) error { return send(msg) })
		if err != nil {
			t.Fatal(err)
		}
		for range 20 {
			called.Add(1)
			callers.Go(func() {
				for n := 0; ; n++ {
					err := b.Call(t.Context(), "name", []byte("x"), func([]byte) error { return nil })
					if n == 0 {
						called.Done()
					}
					if errors.Is(err, ErrNobody) {
						return
					}
					if err != nil {
						t.Errorf("a call while its server stops: %v", err)
						return
					}
				}
			})
		}
		called.Wait()
		stop()
		callers.Wait()
	}
}

// TestStopTakesTasksOnTheirWay stops an owner while many tasks come. It takes each of them, or the
// sender hears that nobody has.
func TestStopTakesTasksOnTheirWay(t *testing.T) {
	nc := start(t, t.TempDir())
	for round := range 10 {
		var taken, refused atomic.Int64
		over := make(chan struct{})
		var once sync.Once
		o, err := OpenOwners(nc, fmt.Sprint("me", round), func(string) { refused.Add(1); once.Do(func() { close(over) }) })
		if err != nil {
			t.Fatal(err)
		}
		first := make(chan struct{}, 1)
		stop, err := o.Tasks("f", func([]byte, bool) {
			taken.Add(1)
			select {
			case first <- struct{}{}:
			default:
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		sent := make(chan int64)
		go func() {
			for n := int64(0); ; n++ {
				select {
				case <-over:
					sent <- n
					return
				default:
				}
				if err := o.Send(o.me, "f", fmt.Sprint(n), []byte("x")); err != nil {
					t.Error(err)
				}
			}
		}()
		<-first
		stop()
		n := <-sent
		until(t, "an account of all tasks", func() bool { return taken.Load()+refused.Load() == n })
		o.Close()
	}
}

// TestOvertakenProcessLeavesItsLastState has a process store the next state of a record after
// another process has read the stream. It ends before it has delivered the result. The other
// process must deliver it.
func TestOvertakenProcessLeavesItsLastState(t *testing.T) {
	t.Parallel()
	of := natstest.Start(t, 1)
	_, nc := openCluster(t, of, 0)
	first := openJournal(t, nc, JournalConfig{})
	running, goOn, delivering := make(chan struct{}), make(chan struct{}), make(chan struct{})
	stop := work(t, first, func(ctx context.Context, r Record) End {
		if r.Kind == Callback {
			close(delivering)
			<-ctx.Done()
			return End{Err: ctx.Err()}
		}
		close(running)
		<-goOn
		return End{Callback: []byte("result of the first"), To: "host"}
	})
	enter(t, first, "f", "a", "x")
	<-running
	_, nc2 := openCluster(t, of, 0)
	second := openJournal(t, nc2, JournalConfig{}) // knows the record as one that runs
	close(goOn)
	<-delivering // the record has its next state, and the earlier one is deleted
	stop()
	got := make(chan string, 2)
	work(t, second, func(_ context.Context, r Record) End {
		got <- fmt.Sprint(r.Kind, " ", string(r.Data))
		return End{}
	})
	if what := <-got; what != fmt.Sprint(Callback, " result of the first") {
		t.Errorf("the second process works on %q, want the callback that is left", what)
	}
}

// TestMarksAreNoRecords opens a journal with three copies of each stream twice, and looks at what
// is left.
func TestMarksAreNoRecords(t *testing.T) {
	t.Parallel()
	of := natstest.Start(t, 3)
	_, nc := openCluster(t, of, 3)
	first := openJournal(t, nc, JournalConfig{})
	enter(t, first, "f", "a", "x")
	_, nc2 := openCluster(t, of, 3)
	second := openJournal(t, nc2, JournalConfig{})
	if n := second.Stats().Resumed; n != 1 {
		t.Errorf("%d records are found, want 1", n)
	}
	for _, s := range append(second.shards, second.dead.stream) {
		info, err := s.Info(t.Context(), jetstream.WithSubjectFilter(">"))
		if err != nil {
			t.Fatal(err)
		}
		for subject := range info.State.Subjects {
			if strings.HasSuffix(subject, markSuffix) {
				t.Errorf("a mark is left: %s", subject)
			}
		}
	}
	if mark(t.Context(), second, second.shards[0]) == 0 {
		t.Error("a stream with three copies has got no mark")
	}
	if err := scan(t.Context(), second, second.shards[0], func(f found) {
		if strings.HasSuffix(f.subject, markSuffix) {
			t.Errorf("a mark counts as a record: %s", f.subject)
		}
	}); err != nil {
		t.Error(err)
	}
}
