package flow

import (
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Remote reaches the processes that own functions. Owners change: a process may end, and another
// one takes its functions over. Owners share no disk with this process.
type Remote interface {
	// Owner returns the id of the process that owns a function now; empty: none is known. It does not
	// block.
	Owner(function string) string
	// Send sends msg to an owner and does not keep it. If the owner does not listen to tasks of the
	// function, [Coordinator.Nobody] is called with the tag, later.
	Send(owner, function, tag string, msg []byte) error
	// Most returns the largest message in bytes.
	Most() int
	// Understands reports whether an owner knows a feature. It does not block.
	Understands(owner, feature string) bool
	// Reaches reports whether this process has connections with all nodes on other machines, so that
	// items go directly between them. It does not block.
	Reaches() bool
}

// Times of tasks that are sent to other processes.
const (
	remoteAgain = 100 * time.Millisecond // between two attempts to find an owner
	// How long an owner that has lost a function may take to answer the tasks that it has. After
	// that, they are tried elsewhere.
	remoteGrace = 2 * time.Second
	// The owner of a task that takes long is asked this often whether it still has the task, because
	// messages are lost with connections to NATS.
	remoteAsk = 5 * time.Second
	// messageRoom is the part of the largest message that a task's items leave free.
	messageRoom = 16 << 10
)

// remote holds the tasks that are with owners in other processes.
type remote struct {
	c *Coordinator

	mu      sync.Mutex
	sent    map[task.Key]*passage
	tags    map[string]*passage // by the tag of the latest message
	last    uint64              // tag
	timer   *time.Timer
	running bool          // the timer is set
	every   time.Duration // remoteAsk, but for tests
	asker   *time.Timer
	asking  bool // the asker is set
	closed  bool
	// pauses says until when messages have the items for a function, because one of its replicas
	// could not fetch an item from this process.
	pauses map[string]time.Time
}

// passage is a task on its way to an owner, or with it.
type passage struct {
	task  *task.Task
	owner string    // that has it; empty: it waits for an owner
	tag   string    // of the latest message about it
	moved time.Time // since when another process owns the function; zero: owner does
	asked time.Time // when owner got the task, or was last asked about it
	// offered has the names of input items that nodes fetch from this process.
	offered []string
}

// letter is an encoded task for an owner.
type letter struct {
	owner   string // empty: nobody owns the function, and msg is empty
	msg     []byte
	offered []string // see passage
}

func newRemote(c *Coordinator) *remote {
	r := &remote{
		c: c, sent: map[task.Key]*passage{}, tags: map[string]*passage{}, every: remoteAsk, pauses: map[string]time.Time{},
	}
	r.timer = time.AfterFunc(time.Hour, r.again)
	r.timer.Stop()
	r.asker = time.AfterFunc(time.Hour, r.ask)
	r.asker.Stop()
	return r
}

// submit sends a task to the owner of its function. If there is none, the task waits for one until
// it is canceled. submit returns the reply that says why a task cannot be sent to any process.
func (r *remote) submit(t *task.Task) *task.Reply {
	l, failed := r.encode(t)
	if failed != nil {
		return failed
	}
	p := &passage{task: t}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sent[t.Key] = p
	r.pass(p, l)
	return nil
}

// pass sends a task to its function's owner, if there is one. The caller holds r.mu.
func (r *remote) pass(p *passage, l letter) {
	if p.offered = l.offered; l.owner == "" || l.owner != r.c.cfg.Remote.Owner(p.task.Function) || r.send(p, l.owner, l.msg) != nil {
		r.arm()
		return
	}
	p.owner, p.moved, p.asked = l.owner, time.Time{}, time.Now()
	if !r.asking && !r.closed {
		r.asking = true
		r.asker.Reset(r.every)
	}
}

// ask asks the owners of tasks that take long.
func (r *remote) ask() {
	r.mu.Lock()
	defer r.mu.Unlock()
	now, next := time.Now(), time.Time{}
	for k, p := range r.sent {
		if p.owner == "" || !p.moved.IsZero() {
			continue // it has no owner, or its owner has changed
		}
		if now.Sub(p.asked) >= r.every {
			p.asked = now
			// If the message is lost, the next one asks.
			_ = r.c.cfg.Remote.Send(p.owner, p.task.Function, "0", wire.AppendAsk(nil, k, p.task.Function, p.task.ReplyTo))
		}
		if due := p.asked.Add(r.every); next.IsZero() || due.Before(next) {
			next = due
		}
	}
	if r.asking = !next.IsZero() && !r.closed; r.asking {
		r.asker.Reset(max(next.Sub(now), r.every/64))
	}
}

// send sends a message under a new tag. The caller holds r.mu.
func (r *remote) send(p *passage, owner string, msg []byte) error {
	r.last++
	delete(r.tags, p.tag)
	p.tag = strconv.FormatUint(r.last, 36)
	r.tags[p.tag] = p
	return r.c.cfg.Remote.Send(owner, p.task.Function, p.tag, msg)
}

// arm has tasks without an owner looked at soon. The caller holds r.mu.
func (r *remote) arm() {
	if !r.running && !r.closed {
		r.running = true
		r.timer.Reset(remoteAgain)
	}
}

// forget removes a task and returns its owner. The caller holds r.mu.
func (r *remote) forget(k task.Key) (owner string, there bool) {
	p := r.sent[k]
	if p == nil {
		return "", false
	}
	delete(r.sent, k)
	delete(r.tags, p.tag)
	return p.owner, true
}

// end removes a task whose reply has come. It reports false if the task was sent to an owner that
// has given up its function, or is about to: then it waits for the next owner, and the reply does
// not count. A reply of an owner that had the task before does not count either, if it gives the
// task back: another owner may have begun the task.
func (r *remote) end(reply *task.Reply) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.sent[reply.Key]
	if p == nil {
		return true
	}
	by, back := reply.GivenBack()
	if back && by != "" && by != p.owner {
		return false
	}
	given := back || p.owner != r.c.cfg.Remote.Owner(p.task.Function)
	if reply.Code == task.Unavailable && reply.Replica == "" && given {
		delete(r.tags, p.tag) // a message that comes back says nothing about the next owner
		p.owner, p.moved = "", time.Time{}
		r.arm()
		return false
	}
	r.refetch(p, reply)
	r.forget(reply.Key)
	return true
}

// cancel tells a task's owner that nobody waits for it. It reports whether the task was with r.
func (r *remote) cancel(k task.Key, function string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	owner, there := r.forget(k)
	if owner != "" {
		// If the message is lost, the task runs until its deadline.
		_ = r.c.cfg.Remote.Send(owner, function, "0", wire.AppendCancel(nil, k, function))
	}
	return there
}

// leave tells the owner of a function that a request has no more tasks for it.
func (r *remote) leave(function, request string) {
	if owner := r.c.cfg.Remote.Owner(function); owner != "" {
		// If the message is lost, replicas are kept for the request until its deadline.
		_ = r.c.cfg.Remote.Send(owner, function, "0", wire.AppendLeave(nil, request, function))
	}
}

// nobody handles a message that had no receiver.
func (r *remote) nobody(tag string) {
	r.mu.Lock()
	p := r.tags[tag]
	var lost *task.Reply
	switch {
	case p == nil:
	case p.moved.IsZero(): // the task itself: the owner has ended, or is not ready yet
		p.owner = ""
		r.arm()
	default:
		lost = r.lose(p)
	}
	r.mu.Unlock()
	if lost != nil {
		r.c.replied(lost)
	}
}

// lose gives a task up and returns its reply. The caller holds r.mu.
func (r *remote) lose(p *passage) *task.Reply {
	r.forget(p.task.Key)
	// A replica may have got it, so a stage that is not idempotent must not run again.
	return &task.Reply{
		Key: p.task.Key, Code: task.ReplicaLost, Replica: "of " + p.owner,
		Message: fmt.Sprintf("the process %s, which owned the function, has ended or lost it", p.owner),
	}
}

// again looks for owners of tasks that have none, and asks owners that have lost their function
// whether they still listen.
func (r *remote) again() {
	r.mu.Lock()
	r.running = false
	var waiting []*passage
	var lost []*task.Reply
	now := time.Now()
	for _, p := range r.sent {
		switch {
		case p.owner == "":
			waiting = append(waiting, p)
		case p.moved.IsZero():
		case now.Sub(p.moved) > remoteGrace:
			lost = append(lost, r.lose(p))
		default:
			// A cancel of no task does nothing.
			_ = r.send(p, p.owner, wire.AppendCancel(nil, task.Key{Request: "-", Task: 1, Attempt: 1}, p.task.Function))
			r.arm()
		}
	}
	r.mu.Unlock()
	for _, reply := range lost {
		r.c.replied(reply)
	}
	for _, p := range waiting {
		r.retry(p)
	}
}

// retry submits a task that waits for an owner. It encodes the task only if there is one, because
// inputs are large.
func (r *remote) retry(p *passage) {
	if !r.owned(p) {
		return
	}
	l, failed := r.encode(p.task)
	r.mu.Lock()
	if r.sent[p.task.Key] != p || p.owner != "" {
		r.mu.Unlock()
		return // canceled, or sent meanwhile
	}
	if failed == nil {
		r.pass(p, l)
		r.mu.Unlock()
		return
	}
	r.forget(p.task.Key)
	r.mu.Unlock()
	r.c.replied(failed)
}

// owned reports whether a waiting task has to be sent to an owner in another process now.
func (r *remote) owned(p *passage) bool {
	near := r.c.cfg.Near
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.sent[p.task.Key] != p || p.owner != "" {
		return false // canceled, or sent meanwhile
	}
	if near != nil && near.Submit(p.task) { // this process has become the owner
		r.forget(p.task.Key)
		return false
	}
	if r.c.cfg.Remote.Owner(p.task.Function) == "" {
		r.arm()
		return false
	}
	return true
}

// changed looks at the owners of all tasks again.
func (r *remote) changed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	for _, p := range r.sent {
		if p.owner == "" || p.owner == r.c.cfg.Remote.Owner(p.task.Function) {
			continue
		}
		if p.moved.IsZero() {
			p.moved = now
		}
		r.arm()
	}
}

func (r *remote) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	r.timer.Stop()
	r.asker.Stop()
}

// Nobody reports that a message of a [Remote] had no receiver.
func (c *Coordinator) Nobody(tag string) { c.remote.nobody(tag) }

// OwnersChanged reports that functions may have other owners. Tasks that an earlier owner does not
// answer soon are tried again elsewhere, as if their replicas were lost.
func (c *Coordinator) OwnersChanged() { c.remote.changed() }
