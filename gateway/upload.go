package gateway

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/peer"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/task"
)

// Lines knows the lines of functions; dispatch.Shell is one.
type Lines interface {
	// Load returns how many tasks of a function wait and how many slots it has; zero for an unknown one.
	Load(function pipeline.Key) task.Load
}

// Bounds of a client's silence while it owes a part of its body.
const (
	// lateTime is how long a request waits for its body's first bytes before its task is queued without them. An upload of which
	// nothing came for so long counts as stalled.
	lateTime = time.Second
	// silentTime is how long an upload may be stalled while other requests wait for the function.
	silentTime = 2 * time.Second
	// lookTime is how often a stalled upload is looked at.
	lookTime = 250 * time.Millisecond
	// share is the part of a function's slots that the stalled uploads of one client may have: one in share.
	share = 4
)

// stalls counts stalled uploads by function and client. The zero value is ready.
type stalls struct {
	mu sync.Mutex
	of map[stallKey]int
}

type stallKey struct {
	function pipeline.Key
	client   netip.Addr
}

// take counts one more, unless there are most already.
func (s *stalls) take(k stallKey, most int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of[k] >= most {
		return false
	}
	if s.of == nil {
		s.of = map[stallKey]int{}
	}
	s.of[k]++
	return true
}

func (s *stalls) give(k stallKey) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.of[k]--; s.of[k] == 0 {
		delete(s.of, k)
	}
}

// upload is the body of a request to a function that speaks HTTP, on its way from the client. It starts the request's task when
// the body has begun, and ends the request when its client's silence costs others. It watches until the answer begins: from then on
// client and function talk, and [Config.Stall] alone is their bound.
type upload struct {
	g        *Gateway
	function pipeline.Key
	body     *source
	invoke   func()             // runs the task, and closes end
	hush     func(error)        // ends the exchange
	cancel   context.CancelFunc // of the task
	end      chan taskEnd       // closed with the task's end, or because there will be no task
	begun    atomic.Bool        // there is a task, or never will be
	slot     atomic.Bool        // the task has met its replica

	mu      sync.Mutex
	timer   *time.Timer
	due     time.Time     // when the next look is
	since   time.Duration // when the Read began that the last look saw, as [source.silent] has it
	late    time.Duration // by how much the looks at this Read came late
	over    bool          // nobody watches any more
	ahead   bool          // the body is read ahead
	stalled bool          // it is counted as key
	key     stallKey
	refused *task.Error // why the request was ended
}

// watch begins to watch, and to wait for the body's first bytes. Nobody else may read r.Trailer from now on: net/http sets it when
// the body ends.
func (u *upload) watch(r *http.Request) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.timer = time.AfterFunc(lateTime, func() { u.look(r) })
	u.due = time.Now().Add(lateTime)
	go func() { // stream waits for it: by u.end if it runs the task, else because it ends the body
		err := u.body.peek()
		if !u.begin() {
			return
		}
		if err != nil {
			u.mu.Lock()
			u.refused = cmp.Or(u.refused, u.g.bodyFault(r.Context(), u.body))
			u.mu.Unlock()
			close(u.end)
			return
		}
		u.invoke()
	}()
}

// begin returns true to the first caller, who starts the task or closes u.end.
func (u *upload) begin() bool { return u.begun.CompareAndSwap(false, true) }

// meets takes note that the task has its slot.
func (u *upload) meets() {
	if u != nil {
		u.slot.Store(true)
	}
}

// close ends the watch. u may be nil.
func (u *upload) close() {
	if u == nil {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.stop()
}

// stop is close with u.mu held.
func (u *upload) stop() {
	u.over = true
	u.timer.Stop()
	u.moves()
}

// refusal returns why the request was ended; nil: it was not. u may be nil.
func (u *upload) refusal() *task.Error {
	if u == nil {
		return nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.refused
}

// silence returns how long the client has sent nothing; 0: nothing is expected of it. The time by which looks came late does not
// count: this process had no processor then, and what the client has sent may not have been read. u.mu is held.
func (u *upload) silence() time.Duration {
	silent, since := u.body.silent()
	if since != u.since {
		u.since, u.late = since, 0
	}
	if silent == 0 {
		return 0
	}
	u.late += time.Since(u.due)
	return max(silent-u.late, 1)
}

// lookAgain has look called after d. u.mu is held.
func (u *upload) lookAgain(d time.Duration) {
	u.due = time.Now().Add(d)
	u.timer.Reset(d)
}

// look is called when the client may have been silent for too long, and sees to it that it is called again.
func (u *upload) look(r *http.Request) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.over {
		return
	}
	silent := u.silence()
	if silent < lateTime {
		u.moves()
		if silent == 0 && !u.ahead && u.begun.Load() && !u.slot.Load() {
			u.ahead = true
			go u.body.ahead() // nobody else reads while it waits in the line; the body's end ends it
		}
		again := lateTime - silent
		if u.late > lookTime {
			again = max(again, lookTime) // for the Read to see what is there
		}
		u.lookAgain(again)
		return
	}
	load := u.load()
	if !u.stalled {
		u.key = stallKey{u.function, u.g.client(r)}
		most := max(cmp.Or(load.Servers, load.Max)/share, 1)
		if u.stalled = u.g.cfg.Lines == nil || u.g.stalls.take(u.key, most); !u.stalled {
			u.refuse(fmt.Sprintf("body: nothing came for %v after %d bytes, and this client has %d such uploads to the function already, want at most a quarter of its slots; "+
				"send the body without pauses", silent.Round(time.Millisecond), u.body.sent.Load(), most))
			return
		}
		if u.begin() {
			go u.invoke() // stream waits for it
		}
	}
	if !u.slot.Load() {
		load.Waiting-- // itself
	}
	if silent >= silentTime && load.Waiting > 0 {
		u.refuse(fmt.Sprintf("body: nothing came for %v after %d bytes while other requests wait for the function; send the body without pauses",
			silent.Round(time.Millisecond), u.body.sent.Load()))
		return
	}
	u.lookAgain(lookTime)
}

// moves takes note that the client does send. u.mu is held.
func (u *upload) moves() {
	if u.stalled && u.g.cfg.Lines != nil {
		u.g.stalls.give(u.key)
	}
	u.stalled = false
}

// client is who sent a request.
func (g *Gateway) client(r *http.Request) netip.Addr {
	if isInside(r) {
		return peer.Proxies(nil).Client(r)
	}
	return g.cfg.Proxies.Client(r)
}

func (u *upload) load() task.Load {
	if u.g.cfg.Lines == nil {
		return task.Load{}
	}
	return u.g.cfg.Lines.Load(u.function)
}

// refuse ends the request with 408, wherever it is, and its task. u.mu is held.
func (u *upload) refuse(cause string) {
	u.stop()
	u.refused = &task.Error{Status: http.StatusRequestTimeout, Cause: cause}
	u.hush(u.refused)
	if u.begin() {
		close(u.end)
	} else {
		u.cancel()
	}
}
