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
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// Lines reports the load of functions; dispatch.Shell implements it.
type Lines interface {
	// Load returns how many tasks of a function wait and how many slots it has. Both are zero for
	// an unknown function.
	Load(function pipeline.Key) task.Load
}

// Bounds for a client that pauses before it has sent its whole body.
const (
	// lateTime is how long a request waits for its body's first bytes before its task is queued
	// without them. An upload that is silent for longer counts as stalled.
	lateTime = time.Second
	// silentTime is how long an upload may be stalled while other requests wait for the function.
	silentTime = 2 * time.Second
	// lookTime is the interval between checks of a stalled upload.
	lookTime = 250 * time.Millisecond
	// share limits the stalled uploads of one client to 1/share of a function's slots.
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

// take counts one more stalled upload of k. It returns false if k has already reached its largest
// number, which is most.
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

// upload watches the body of a request to a function that speaks HTTP while the client sends it. It
// starts the request's task when the body begins to arrive. It ends the request if the client's
// silence delays other requests. The watch stops when the answer begins. From then on, only
// [Config.Stall] limits the client's silence.
type upload struct {
	g           *Gateway
	function    pipeline.Key
	body        *source
	invoke      func()             // runs the task and closes end
	endExchange func(error)        // ends the exchange
	cancel      context.CancelFunc // cancels the task
	end         chan taskEnd       // closed when the task ends or will never start
	begun       atomic.Bool        // the task has started or will never start
	slot        atomic.Bool        // the task's replica has arrived

	mu      sync.Mutex
	timer   *time.Timer
	due     time.Time     // time of the next check
	since   time.Duration // start of the Read that the last check saw, see [source.silent]
	late    time.Duration // total delay of the checks during this Read
	over    bool          // watching has ended
	ahead   bool          // the body is being read ahead
	stalled bool          // counted in stalls under key
	key     stallKey
	refused *task.Error // why the request was ended
}

// watch starts watching and waits for the body's first bytes. From now on nobody else may read
// r.Trailer, because net/http sets it when the body ends.
func (u *upload) watch(r *http.Request) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.timer = time.AfterFunc(lateTime, func() { u.look(r) })
	u.due = time.Now().Add(lateTime)
	go func() { // stream waits for it: through u.end if it runs the task, else by ending the body
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

// begin returns true to its first caller, which starts the task or closes u.end.
func (u *upload) begin() bool { return u.begun.CompareAndSwap(false, true) }

// meets records that the task has its slot.
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

// stop is close for callers that hold u.mu.
func (u *upload) stop() {
	u.over = true
	u.timer.Stop()
	u.moves()
}

// refusal returns why the request was ended, or nil. u may be nil.
func (u *upload) refusal() *task.Error {
	if u == nil {
		return nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.refused
}

// silence returns how long the client has been silent while it owed data. It returns 0 if the
// client owes none. It subtracts the delays of late checks: a late check shows that this process
// had no processor, so it may not have read data that has arrived. The caller holds u.mu.
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

// lookAgain calls look after d. The caller holds u.mu.
func (u *upload) lookAgain(d time.Duration) {
	u.due = time.Now().Add(d)
	u.timer.Reset(d)
}

// look checks a client that may have been silent for too long, and schedules the next check.
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
			// Nobody else reads while the request waits in line. The end of the body ends this
			// read.
			go u.body.ahead()
		}
		again := lateTime - silent
		if u.late > lookTime {
			again = max(again, lookTime) // gives the Read time to see bytes that have arrived
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
		load.Waiting-- // do not count this request
	}
	if silent >= silentTime && load.Waiting > 0 {
		u.refuse(fmt.Sprintf("body: nothing came for %v after %d bytes while other requests wait for the function; send the body without pauses",
			silent.Round(time.Millisecond), u.body.sent.Load()))
		return
	}
	u.lookAgain(lookTime)
}

// moves records that the client sends. The caller holds u.mu.
func (u *upload) moves() {
	if u.stalled && u.g.cfg.Lines != nil {
		u.g.stalls.give(u.key)
	}
	u.stalled = false
}

// client returns the address of a request's sender.
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

// refuse ends the request and its task with 408, whatever its state. The caller holds u.mu.
func (u *upload) refuse(cause string) {
	u.stop()
	u.refused = &task.Error{Status: http.StatusRequestTimeout, Cause: cause}
	u.endExchange(u.refused)
	if u.begin() {
		close(u.end)
	} else {
		u.cancel()
	}
}
