package flow

import (
	"cmp"
	"context"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// process is one that owns functions.
type process struct {
	gone    bool                           // it does not listen
	forgets bool                           // it does not know the tasks that it is asked for
	work    func(*task.Task) []*task.Reply // replies at once; nil: none come
	knows   string                         // a feature
}

// owners is a Remote with processes that live in the test.
type owners struct {
	c *Coordinator

	mu        sync.Mutex
	owner     string
	processes map[string]*process
	got       []string // tasks by owner, with their attempts
	canceled  []string
	asked     int  // how often
	apart     bool // a node is not connected
	calls     sync.WaitGroup
}

func (o *owners) Owner(string) string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.owner
}

func (o *owners) Most() int { return 1 << 20 }

func (o *owners) Understands(owner, feature string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := o.processes[owner]
	return p != nil && p.knows == feature
}

func (o *owners) Reaches() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return !o.apart
}

func (o *owners) Send(owner, _, tag string, msg []byte) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	p := o.processes[owner]
	if p == nil || p.gone {
		o.calls.Go(func() { o.c.Nobody(tag) })
		return nil
	}
	kind, err := wire.EnvelopeKind(msg)
	if err != nil {
		return err
	}
	switch kind {
	case wire.KindCancel:
		if key, _, err := wire.DecodeCancel(msg); err == nil && key.Request != "-" {
			o.canceled = append(o.canceled, owner)
		}
		return nil
	case wire.KindLeave:
		return nil
	case wire.KindAsk:
		key, _, to, err := wire.DecodeAsk(msg)
		o.asked++
		if p.forgets && key.Attempt == 1 {
			o.calls.Go(func() {
				if to != o.c.inbox {
					return // to nobody
				}
				o.c.receive(wire.AppendReply(nil, &task.Reply{Key: key, Code: task.ReplicaLost, Replica: "unknown", Message: "a message was lost"}))
			})
		}
		return err
	}
	t, err := wire.DecodeTask(msg)
	if err != nil {
		return err
	}
	o.got = append(o.got, owner+strings.Repeat("'", int(t.Attempt)-1))
	if p.work != nil {
		o.calls.Go(func() {
			for _, r := range p.work(t) {
				r.Key = t.Key
				o.c.receive(wire.AppendReply(nil, r))
			}
		})
	}
	return nil
}

// move gives all functions to another owner; empty: none is known.
func (o *owners) move(to string, change func()) {
	o.mu.Lock()
	o.owner = to
	if change != nil {
		change()
	}
	o.mu.Unlock()
	o.c.OwnersChanged()
}

// until waits for what o has seen. done runs with o.mu held, so it must not take the lock of a
// coordinator, which calls o with its lock held.
func (o *owners) until(t *testing.T, what string, done func() bool) {
	t.Helper()
	proctest.Until(t, what, func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return done()
	})
}

func echoes(t *task.Task) []*task.Reply { return []*task.Reply{echo(t)} }

// remoteRig returns a coordinator whose functions belong to other processes, and a function that
// starts a request.
func remoteRig(t *testing.T, o *owners, idempotent bool) (r *rig, invoke func() <-chan *task.Error) {
	g := graph(t, "a")
	g.Stages[0].Idempotent = idempotent
	r = newRig(t, g, nil, nil)
	o.c = r.Coordinator
	r.cfg.Remote = o // set before the first request
	r.remote = newRemote(r.Coordinator)
	t.Cleanup(func() {
		o.calls.Wait()
		r.remote.mu.Lock()
		defer r.remote.mu.Unlock()
		if len(r.remote.sent) > 0 || len(r.remote.tags) > 0 {
			t.Errorf("%d tasks and %d tags are left", len(r.remote.sent), len(r.remote.tags))
		}
	})
	return r, func() <-chan *task.Error {
		done := make(chan *task.Error, 1)
		go func() {
			resp, terr := r.Invoke(t.Context(), request("r", "hello"))
			if terr == nil && string(resp.Output[0].Items[0].Bytes) != "hello" {
				t.Errorf("got %+v", resp)
			}
			done <- terr
		}()
		return done
	}
}

// TestTasksWaitForAnOwner has no owner at first, then one that does not listen yet.
func TestTasksWaitForAnOwner(t *testing.T) {
	o := &owners{processes: map[string]*process{"x": {gone: true, work: echoes}}}
	r, invoke := remoteRig(t, o, false)
	done := invoke()
	proctest.Until(t, "the task", func() bool { r.remote.mu.Lock(); defer r.remote.mu.Unlock(); return len(r.remote.sent) == 1 })
	o.move("x", nil)
	proctest.Until(t, "the task to be sent", func() bool { return r.remoteSent() > 1 })
	o.move("x", func() { o.processes["x"].gone = false })
	if terr := <-done; terr != nil {
		t.Error(terr)
	}
	if len(o.got) != 1 || o.got[0] != "x" {
		t.Errorf("tasks %v, want one, in its first attempt", o.got)
	}
	r.close()
}

// remoteSent returns how many messages were sent.
func (r *rig) remoteSent() uint64 {
	r.remote.mu.Lock()
	defer r.remote.mu.Unlock()
	return r.remote.last
}

// TestTasksOfLostOwnersAreTriedElsewhere has an owner end, or lose its functions, while it has a
// task.
func TestTasksOfLostOwnersAreTriedElsewhere(t *testing.T) {
	for name, tc := range map[string]struct {
		idempotent bool
		first      process
		ends       bool // the first owner ends when it loses its functions
		want       string
		status     int
	}{
		"it has ended":                        {true, process{}, true, "x y'", 0},
		"it is stuck":                         {true, process{}, false, "x y'", 0},
		"it has ended, and may not run twice": {false, process{}, true, "x", http.StatusBadGateway},
		"it gives its waiting tasks back": {false, process{work: func(*task.Task) []*task.Reply {
			return []*task.Reply{{Code: task.Unavailable, Message: task.OwnerEnds}}
		}}, false, "x y", 0},
	} {
		t.Run(name, func(t *testing.T) {
			o := &owners{owner: "x", processes: map[string]*process{"x": &tc.first, "y": {work: echoes}}}
			var moved sync.WaitGroup
			if work := tc.first.work; work != nil {
				tc.first.work = func(t *task.Task) []*task.Reply { moved.Wait(); return work(t) }
			}
			moved.Add(1)
			r, invoke := remoteRig(t, o, tc.idempotent)
			done := invoke()
			o.until(t, "the task", func() bool { return len(o.got) == 1 })
			o.move("y", func() { tc.first.gone = tc.ends })
			moved.Done()
			terr := <-done
			switch {
			case tc.status == 0 && terr != nil:
				t.Error(terr)
			case tc.status != 0 && (terr == nil || terr.Status != tc.status || !strings.Contains(terr.Cause, "the process x")):
				t.Errorf("got %+v, want status %d with the owner", terr, tc.status)
			}
			o.mu.Lock()
			if got := strings.Join(o.got, " "); got != tc.want {
				t.Errorf("tasks %q, want %q", got, tc.want)
			}
			o.mu.Unlock()
			r.close()
		})
	}
}

// TestLostMessages loses a message about a task while the owner stays the same. If the owner still
// has the task, the coordinator waits. Otherwise it tries the task again, if the task may run
// twice.
func TestLostMessages(t *testing.T) {
	for name, tc := range map[string]struct {
		idempotent, forgets bool
		want                string
		status              int
	}{
		"it is lost":                        {true, true, "x x'", 0},
		"it is lost, and may not run twice": {false, true, "x", http.StatusBadGateway},
		"the owner has it":                  {true, false, "x", 0},
	} {
		t.Run(name, func(t *testing.T) {
			goOn := make(chan struct{})
			work := func(k *task.Task) []*task.Reply {
				if k.Attempt == 1 && tc.forgets {
					return nil
				}
				<-goOn
				return echoes(k)
			}
			o := &owners{owner: "x", processes: map[string]*process{"x": {work: work, forgets: tc.forgets}}}
			r, invoke := remoteRig(t, o, tc.idempotent)
			r.remote.every = time.Millisecond
			done := invoke()
			o.until(t, "the owner to be asked", func() bool { return o.asked > 0 })
			if !tc.forgets {
				o.until(t, "the owner to be asked again", func() bool { return o.asked > 3 })
			}
			close(goOn)
			terr := <-done
			if tc.status == 0 && terr != nil || tc.status != 0 && (terr == nil || terr.Status != tc.status || !strings.Contains(terr.Cause, "a message was lost")) {
				t.Errorf("got %+v, want status %d", terr, tc.status)
			}
			o.mu.Lock()
			if got := strings.Join(o.got, " "); got != tc.want {
				t.Errorf("tasks %q, want %q", got, tc.want)
			}
			o.mu.Unlock()
			r.close()
		})
	}
}

// TestAnswersOfAFormerOwnerCount has an owner answer a task after it has lost its functions.
func TestAnswersOfAFormerOwnerCount(t *testing.T) {
	goOn := make(chan struct{})
	o := &owners{owner: "x", processes: map[string]*process{"x": {work: func(t *task.Task) []*task.Reply { <-goOn; return echoes(t) }}, "y": {}}}
	r, invoke := remoteRig(t, o, false)
	done := invoke()
	o.until(t, "the task", func() bool { return len(o.got) == 1 })
	o.move("y", nil)
	close(goOn)
	if terr := <-done; terr != nil {
		t.Error(terr)
	}
	r.close()
}

// TestTasksGivenBackEarly has an owner that ends give a task back before anyone knows that it ends.
func TestTasksGivenBackEarly(t *testing.T) {
	x := &process{}
	o := &owners{owner: "x", processes: map[string]*process{"x": x, "y": {work: echoes}}}
	x.work = func(*task.Task) []*task.Reply {
		o.mu.Lock()
		defer o.mu.Unlock()
		x.gone = true
		return []*task.Reply{{Code: task.Unavailable, Message: task.OwnerEnds}}
	}
	r, invoke := remoteRig(t, o, false)
	done := invoke()
	proctest.Until(t, "the task to be sent again", func() bool {
		select {
		case terr := <-done:
			t.Fatalf("got %+v before there is another owner", terr)
		default:
		}
		return r.remoteSent() > 1
	})
	o.move("y", nil)
	if terr := <-done; terr != nil {
		t.Errorf("got %+v, want the answer of y", terr)
	}
	r.close()
}

// TestTasksGivenBackAreNotLost has an owner give a task back after it has lost its functions. That
// an earlier message to it had no receiver must not end the task, which may not run twice.
func TestTasksGivenBackAreNotLost(t *testing.T) {
	goOn := make(chan struct{})
	o := &owners{owner: "x", processes: map[string]*process{
		"x": {work: func(*task.Task) []*task.Reply {
			<-goOn
			return []*task.Reply{{Code: task.Unavailable, Message: task.OwnerEnds}}
		}},
		"y": {work: echoes},
	}}
	r, invoke := remoteRig(t, o, false)
	done := invoke()
	tag := ""
	waiting := func(owner string) func() bool {
		return func() bool {
			r.remote.mu.Lock()
			defer r.remote.mu.Unlock()
			for _, p := range r.remote.sent {
				if p.owner == owner {
					tag = cmp.Or(tag, p.tag)
					return true
				}
			}
			return false
		}
	}
	o.until(t, "the task", func() bool { return len(o.got) == 1 })
	o.mu.Lock()
	o.owner = ""
	o.mu.Unlock()
	if !waiting("x")() {
		t.Fatal("the task is not with x")
	}
	r.OwnersChanged()
	close(goOn)
	proctest.Until(t, "the task to be given back", waiting(""))
	r.Nobody(tag)
	o.move("y", nil)
	if terr := <-done; terr != nil {
		t.Errorf("got %+v, want the answer of y", terr)
	}
	r.close()
}

// TestGivenBackTwice has an owner give a task back, and say so again while the next owner has the
// task. The task, which may not run twice, stays with the next owner. If that one gives it back,
// too, the one after it gets the task.
func TestGivenBackTwice(t *testing.T) {
	back := func(owner string) []*task.Reply {
		r := &task.Reply{Code: task.Unavailable, Message: task.OwnerEnds}
		r.SignBack(owner)
		return []*task.Reply{r}
	}
	x, y := &process{}, &process{}
	o := &owners{owner: "x", processes: map[string]*process{"x": x, "y": y, "z": {work: echoes}}}
	x.work = func(*task.Task) []*task.Reply {
		o.mu.Lock()
		defer o.mu.Unlock()
		x.gone = true
		return back("x")
	}
	ctx, goOn := context.WithCancel(t.Context())
	defer goOn()
	y.work = func(*task.Task) []*task.Reply { <-ctx.Done(); return back("y") }
	r, invoke := remoteRig(t, o, false)
	done := invoke()
	has := func(owner string) func() bool {
		return func() bool {
			r.remote.mu.Lock()
			defer r.remote.mu.Unlock()
			for _, p := range r.remote.sent {
				return p.owner == owner
			}
			return false
		}
	}
	proctest.Until(t, "the task to be given back", has(""))
	o.move("y", nil)
	proctest.Until(t, "the next owner to get the task", has("y"))
	r.remote.mu.Lock()
	var key task.Key
	for k := range r.remote.sent {
		key = k
	}
	r.remote.mu.Unlock()
	again := back("x")[0]
	again.Key = key
	r.receive(wire.AppendReply(nil, again))
	if !has("y")() {
		t.Fatal("an owner that has given the task back has taken it from the next one")
	}
	o.mu.Lock()
	y.gone = true
	o.mu.Unlock()
	goOn()
	proctest.Until(t, "the task to be given back again", has(""))
	o.move("z", nil)
	if terr := <-done; terr != nil {
		t.Errorf("got %+v, want the answer of z", terr)
	}
	if got := strings.Join(o.got, " "); got != "x y z" {
		t.Errorf("tasks %q, want each owner to get it once", got)
	}
	r.close()
}

// TestLargeInputsAreRefused checks inputs that no message can carry.
func TestLargeInputsAreRefused(t *testing.T) {
	o := &owners{owner: "x", processes: map[string]*process{"x": {work: echoes}}}
	r, _ := remoteRig(t, o, true)
	for size, status := range map[int]int{900 << 10: 0, 2 << 20: http.StatusBadRequest} {
		_, terr := r.Invoke(t.Context(), request("r", strings.Repeat("x", size)))
		if status == 0 && terr != nil || status != 0 && (terr == nil || terr.Status != status || !strings.Contains(terr.Cause, "max_payload")) {
			t.Errorf("%d bytes: %+v, want status %d", size, terr, status)
		}
	}
	r.close()
}
