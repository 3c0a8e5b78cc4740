package warden

import (
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// answerTimeout bounds how long a warden may take to answer: a process with a root of its own may take half of it.
const answerTimeout = time.Minute

// remote is the way to a warden in another process.
type remote struct {
	wire  *wire
	pid   int // of the warden
	pidfd int
	done  chan struct{} // closed when nothing is read any more

	attaching sync.Mutex

	mu      sync.Mutex
	nextID  uint64
	pending map[uint64]*request
	running map[string]int  // pids of processes whose end has not been told, by name
	late    map[string]bool // starts that were given up before they were answered
	onExit  func(Exit)
	closed  bool
	lost    error // why there is no warden any more; nil: there is
}

// request is a message that waits for its answer.
type request struct {
	op, name string
	kept     []Kept // of attach
	answer   chan message
}

// greet makes the connection to a warden that of its manager.
func greet(conn *net.UnixConn, deadline time.Time) (*remote, error) {
	r := &remote{
		wire: newWire(conn), done: make(chan struct{}), pending: map[uint64]*request{}, running: map[string]int{}, late: map[string]bool{},
	}
	if err := conn.SetReadDeadline(deadline); err != nil {
		return nil, err
	}
	sent := r.wire.send(message{Op: opHello}) // fails when it has refused us already
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
	r.pid = m.PID
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return nil, errors.Join(err, unix.Close(r.pidfd))
	}
	go r.read() // ends with the connection; done says so
	return r, nil
}

// read handles what the warden says until there is nothing more.
func (r *remote) read() {
	defer close(r.done)
	for {
		m, err := r.wire.receive()
		if err != nil {
			r.end(err)
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
	q := r.pending[m.ID]
	delete(r.pending, m.ID)
	if q != nil && q.op == opStart && m.Error == "" {
		r.running[q.name] = m.PID
	}
	late := q != nil && r.late[q.name]
	if late && m.Error != "" {
		delete(r.late, q.name)
	}
	r.mu.Unlock()
	switch {
	case q == nil:
	case late && m.Error == "":
		_ = r.wire.send(message{Op: opSignal, Name: q.name, Signal: int(unix.SIGKILL)}) // fails when the warden is gone
	case !late:
		q.answer <- m // has room for the only one
	}
}

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
	late, tell := r.late[e.Name], r.onExit
	delete(r.running, e.Name)
	delete(r.late, e.Name)
	r.mu.Unlock()
	switch {
	case late:
		_ = r.wire.send(message{Op: opDrop, Name: e.Name}) // fails when the warden is gone
	case tell != nil:
		tell(e)
	}
}

// end says that there is no warden any more, and sees to it: what it has started ends with it.
func (r *remote) end(why error) {
	r.mu.Lock()
	closed := r.closed
	r.mu.Unlock()
	if !closed {
		_ = unix.PidfdSendSignal(r.pidfd, unix.SIGKILL, nil, 0) // fails when it has ended
		if !awaitEnd(r.pidfd, sendTimeout) {
			why = fmt.Errorf("%w; process %d is still there after SIGKILL", why, r.pid)
		}
		_, _ = unix.Wait4(r.pid, nil, unix.WNOHANG, nil) // if it is a child of ours
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
		if tell != nil && !closed {
			tell(Exit{Name: name, PID: pid, Err: lost})
		}
	}
}

// awaitEnd waits for the end of a process.
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

// ask sends a message and waits for its answer.
func (r *remote) ask(m message) (message, []Kept, error) {
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
		if errors.Is(err, errTooLarge) || errors.Is(err, os.ErrDeadlineExceeded) { // nothing of it was sent
			r.mu.Lock()
			delete(r.pending, m.ID)
			r.mu.Unlock()
			return message{}, nil, fmt.Errorf("warden: %w", err)
		}
		_ = r.wire.conn.Close() // then read says what has happened
	}
	t := time.NewTimer(answerTimeout)
	defer t.Stop()
	select {
	case a := <-q.answer:
		return a, q.kept, a.err()
	case <-t.C:
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if m.Op == opStart && r.lost == nil {
		r.late[m.Name] = true
	}
	return message{}, nil, fmt.Errorf("warden: %s %q: not answered within %v", m.Op, m.Name, answerTimeout)
}

func (r *remote) attach(onExit func(Exit)) ([]Kept, error) {
	r.attaching.Lock()
	defer r.attaching.Unlock()
	r.mu.Lock()
	before := r.onExit
	r.onExit = onExit
	r.mu.Unlock()
	_, kept, err := r.ask(message{Op: opAttach})
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
	_, _, err := r.ask(message{Op: opRelease}) // exits that came before the answer have been told
	r.mu.Lock()
	r.onExit = nil
	clear(r.running)
	r.mu.Unlock()
	return err
}

func (r *remote) start(p Process) (int, error) {
	if err := check(p.Name, p.Meta, p.Keep); err != nil {
		return 0, err
	}
	m := message{Op: opStart, Name: p.Name, Meta: p.Meta, Idle: p.Idle, Keep: len(p.Keep)}
	m.setCommand(p.Command)
	m.files = append(m.files, p.Keep...)
	a, _, err := r.ask(m)
	return a.PID, err
}

func (r *remote) signal(name string, s syscall.Signal) error {
	_, _, err := r.ask(message{Op: opSignal, Name: name, Signal: int(s)})
	return err
}

func (r *remote) put(name string, meta []byte, files []*os.File) error {
	if err := check(name, meta, files); err != nil {
		return err
	}
	_, _, err := r.ask(message{Op: opPut, Name: name, Meta: meta, files: files, Keep: len(files)})
	return err
}

func (r *remote) drop(name string) error {
	_, _, err := r.ask(message{Op: opDrop, Name: name})
	if errors.Is(err, ErrLost) {
		return nil // and all that it kept
	}
	return err
}

// close takes leave: the warden goes on.
func (r *remote) close() {
	r.mu.Lock()
	r.closed = true
	r.mu.Unlock()
	_ = r.wire.conn.SetReadDeadline(time.Unix(1, 0))
	<-r.done
}
