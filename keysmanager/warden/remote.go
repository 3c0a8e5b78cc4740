package warden

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// answerTimeout bounds how long a warden may take to answer. To start a process with a root of its
// own may take half of it.
const answerTimeout = time.Minute

// remote is the connection to a warden in another process.
type remote struct {
	wire     *wire
	pid      int    // pid of the warden
	runs     string // as Server.Runs
	pidfd    int
	patience time.Duration  // normally answerTimeout
	starts   chan struct{}  // has an element per start that the warden works on
	done     chan struct{}  // closed when reading has ended
	sends    sync.WaitGroup // messages that are sent without waiting for an answer

	attaching sync.Mutex

	mu      sync.Mutex
	nextID  uint64
	pending map[uint64]*request
	running map[string]int  // pids of running processes by name, until their end is reported
	late    map[string]bool // names of processes whose start was not answered in time
	onExit  func(Exit)
	closed  bool
	lost    error // why the warden has ended; nil: it runs
}

// request is a message that waits for its answer.
type request struct {
	op, name string
	kept     []Kept // entries of attach
	answer   chan message
	ended    bool // the process that it starts has already ended
	late     bool // the caller no longer waits
}

// greet makes this process the manager of the warden at a connection.
func greet(conn *net.UnixConn, deadline time.Time) (*remote, error) {
	r := &remote{
		wire: newWire(conn), patience: answerTimeout, starts: make(chan struct{}, maxStarts), done: make(chan struct{}), pending: map[uint64]*request{}, running: map[string]int{}, late: map[string]bool{},
	}
	if err := conn.SetReadDeadline(deadline); err != nil {
		return nil, err
	}
	sent := r.wire.send(message{Op: opHello}) // fails if the warden has refused the connection already
	m, err := r.wire.receive()
	if err != nil {
		return nil, errors.Join(sent, err)
	}
	defer m.close()
	if m.Version != Version {
		return nil, fault{text: fmt.Sprintf("it speaks version %d, want %d: end process %d, or use the release that started it", m.Version, Version, m.PID)}
	}
	if err := m.err(); err != nil {
		return nil, err
	}
	if r.pidfd, err = unix.PidfdOpen(m.PID, 0); err != nil {
		return nil, fmt.Errorf("process %d: %w", m.PID, err)
	}
	r.pid, r.runs = m.PID, m.Runs
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(err, unix.Close(r.pidfd))
	}
	go r.read() // ends with the connection and closes done
	return r, nil
}

// read handles the messages of the warden until the connection ends.
func (r *remote) read() {
	defer close(r.done)
	for {
		m, err := r.wire.receive()
		if err != nil {
			r.end(err)
			r.sends.Wait()
			return
		}
		switch m.Op {
		case opAnswer:
			r.answered(m)
		case opKept:
			r.listed(m)
		case opExit:
			m.close()
			r.exited(Exit{Name: m.Name, PID: m.PID, Status: unix.WaitStatus(m.Status)})
		default:
			m.close()
		}
	}
}

func (r *remote) answered(m message) {
	m.close()
	r.mu.Lock()
	defer r.mu.Unlock()
	q := r.pending[m.ID]
	delete(r.pending, m.ID)
	if q == nil {
		return
	}
	started := q.op == opStart && m.Error == ""
	if started && !q.ended {
		r.running[q.name] = m.PID
	}
	switch {
	case !q.late:
		q.answer <- m // has room for the only answer
	case started && q.ended:
		r.sendAsync(message{Op: opDrop, Name: q.name})
	case started:
		r.late[q.name] = true
		r.sendAsync(message{Op: opSignal, Name: q.name, Signal: int(unix.SIGKILL)})
	default:
		closeAll(q.kept)
	}
}

// sendAsync sends a message whose answer is ignored. It does not block the reading goroutine. It
// fails if the warden has ended.
func (r *remote) sendAsync(m message) { r.sends.Go(func() { _ = r.wire.send(m) }) }

func (r *remote) listed(m message) {
	r.mu.Lock()
	defer r.mu.Unlock()
	q := r.pending[m.ID]
	if q == nil {
		m.close()
		return
	}
	q.kept = append(q.kept, Kept{
		Name: m.Name, Meta: m.Meta, Files: m.files, PID: m.PID, Ended: m.Ended, Status: unix.WaitStatus(m.Status), Lost: m.Lost,
	})
	if m.PID != 0 && !m.Ended {
		r.running[m.Name] = m.PID
	}
}

func (r *remote) exited(e Exit) {
	r.mu.Lock()
	_, known := r.running[e.Name]
	late, tell := r.late[e.Name], r.onExit
	delete(r.running, e.Name)
	delete(r.late, e.Name)
	for _, q := range r.pending {
		if !known && q.op == opStart && q.name == e.Name {
			q.ended = true // the answer to its start comes later
		}
	}
	r.mu.Unlock()
	switch {
	case late:
		r.sendAsync(message{Op: opDrop, Name: e.Name})
	case tell != nil:
		tell(e)
	}
}

// end reports that the warden has ended. end kills a warden that still runs; the kernel then kills
// the processes of the warden. end kills the rest of their process groups.
func (r *remote) end(why error) {
	r.mu.Lock()
	closed := r.closed
	r.mu.Unlock()
	if !closed {
		_ = unix.PidfdSendSignal(r.pidfd, unix.SIGKILL, nil, 0) // fails if it has ended
		if !awaitEnd(r.pidfd, sendTimeout) {
			why = fmt.Errorf("%w; process %d still runs after SIGKILL", why, r.pid)
		}
		_, _ = unix.Wait4(r.pid, nil, unix.WNOHANG, nil) // if it is a child of this process
	}
	_ = unix.Close(r.pidfd)
	_ = r.wire.conn.Close()
	r.mu.Lock()
	r.lost = ErrClosed
	if !closed {
		r.lost = fmt.Errorf("%w (process %d: %w)", ErrLost, r.pid, why)
	}
	lost, tell := r.lost, r.onExit
	pending, running := r.pending, r.running
	r.pending, r.running = nil, nil
	r.mu.Unlock()
	for _, q := range pending {
		closeAll(q.kept)
		m := message{}
		m.fail(lost)
		q.answer <- m
	}
	for name, pid := range running {
		if closed {
			break
		}
		if pid > 1 {
			// This fails if the group is empty. Otherwise, the number still belongs to the group.
			_ = unix.Kill(-pid, unix.SIGKILL)
		}
		if tell != nil {
			tell(Exit{Name: name, PID: pid, Err: lost})
		}
	}
}

// awaitEnd waits until a process has ended, and reports whether it has.
func awaitEnd(pidfd int, limit time.Duration) bool {
	for deadline := time.Now().Add(limit); ; {
		left := time.Until(deadline)
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}, int(max(left, 0).Milliseconds()))
		if n > 0 {
			return true
		}
		if left <= 0 || err != nil && !errors.Is(err, unix.EINTR) {
			return false
		}
	}
}

// ask sends a message and waits for its answer. If ctx ends first, the warden is told, and answers
// soon. That is for starts.
func (r *remote) ask(ctx context.Context, m message) (message, []Kept, error) {
	q := &request{op: m.Op, name: m.Name, answer: make(chan message, 1)}
	r.mu.Lock()
	if r.lost != nil {
		defer r.mu.Unlock()
		return message{}, nil, r.lost
	}
	r.nextID++
	m.ID = r.nextID
	r.pending[m.ID] = q
	r.mu.Unlock()
	if err := r.wire.send(m); err != nil {
		if errors.Is(err, errTooLarge) || errors.Is(err, os.ErrDeadlineExceeded) { // nothing was sent
			r.mu.Lock()
			delete(r.pending, m.ID)
			r.mu.Unlock()
			return message{}, nil, fmt.Errorf("warden: %w", err)
		}
		_ = r.wire.conn.Close() // read then reports the cause
	}
	late := fmt.Errorf("warden: %s %q: not answered within %v", m.Op, m.Name, r.patience)
	t := time.NewTimer(r.patience)
	defer t.Stop()
	select {
	case a := <-q.answer:
		return a, q.kept, a.err()
	case <-ctx.Done():
		late = fmt.Errorf("warden: %s %q: not answered within %v after its cancellation: %w", m.Op, m.Name, sendTimeout, context.Cause(ctx))
		r.cancel(m.ID, context.Cause(ctx))
		t.Reset(sendTimeout)
		select {
		case a := <-q.answer:
			return a, q.kept, a.err()
		case <-t.C:
		}
	case <-t.C:
	}
	r.mu.Lock()
	_, waits := r.pending[m.ID]
	q.late = waits
	r.mu.Unlock()
	if !waits { // the answer came at this moment
		a := <-q.answer
		return a, q.kept, a.err()
	}
	if m.Op == opStart && ctx.Err() == nil {
		r.cancel(m.ID, late)
	}
	return message{}, nil, late
}

// cancel ends a start in the warden.
func (r *remote) cancel(id uint64, why error) {
	_ = r.wire.send(message{Op: opCancel, Of: id, Error: why.Error()}) // if it fails, read says why
}

func (r *remote) attach(onExit func(Exit)) ([]Kept, error) {
	r.attaching.Lock()
	defer r.attaching.Unlock()
	r.mu.Lock()
	before := r.onExit
	r.onExit = onExit
	r.mu.Unlock()
	_, kept, err := r.ask(context.Background(), message{Op: opAttach})
	if err != nil {
		closeAll(kept)
		r.mu.Lock()
		r.onExit = before
		r.mu.Unlock()
		return nil, err
	}
	return kept, nil
}

func (r *remote) release() error {
	r.attaching.Lock()
	defer r.attaching.Unlock()
	// Exits that come before the answer are reported.
	_, _, err := r.ask(context.Background(), message{Op: opRelease})
	r.mu.Lock()
	r.onExit = nil
	clear(r.running)
	r.mu.Unlock()
	return err
}

func (r *remote) start(ctx context.Context, p Process) (int, error) {
	if err := check(p.Name, p.Meta, p.Keep); err != nil {
		return 0, err
	}
	m := message{Op: opStart, Name: p.Name, Meta: p.Meta, Idle: p.Idle, Keep: len(p.Keep)}
	select {
	case r.starts <- struct{}{}:
		defer func() { <-r.starts }()
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return 0, fmt.Errorf("warden: process %q: %w", p.Name, context.Cause(ctx))
	}
	m.setCommand(p.Command)
	m.files = append(m.files, p.Keep...)
	a, _, err := r.ask(ctx, m)
	if why := context.Cause(ctx); err != nil && why != nil {
		err = fault{err.Error(), errors.Join(err, why)} // the text has the cause, if it was the cause
	}
	return a.PID, err
}

func (r *remote) signal(name string, s syscall.Signal) error {
	_, _, err := r.ask(context.Background(), message{Op: opSignal, Name: name, Signal: int(s)})
	return err
}

func (r *remote) put(name string, meta []byte, files []*os.File) error {
	if err := check(name, meta, files); err != nil {
		return err
	}
	_, _, err := r.ask(context.Background(), message{Op: opPut, Name: name, Meta: meta, files: files, Keep: len(files)})
	return err
}

func (r *remote) drop(name string) error {
	_, _, err := r.ask(context.Background(), message{Op: opDrop, Name: name})
	if errors.Is(err, ErrLost) {
		return nil // its entries are gone, too
	}
	return err
}

// close disconnects from the warden, which keeps running.
func (r *remote) close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	_ = r.wire.conn.SetReadDeadline(time.Unix(1, 0))
	<-r.done
}
