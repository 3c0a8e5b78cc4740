package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// heldMessage is a message between a Holder and a process that waits. Each is one packet of JSON.
// Package entry has the same message for the programs of containers, and imports nothing.
type heldMessage struct {
	Ready bool     `json:"ready,omitempty"` // the process waits
	Env   []string `json:"env,omitempty"`   // begin, with these variables in addition
	Begun bool     `json:"begun,omitempty"` // the process begins
	Fault string   `json:"fault,omitempty"` // why it cannot
}

// maxHeld is the maximum size of a heldMessage, in bytes.
const maxHeld = 16 << 10

// heldConn is one end of the socket between a Holder and a process that waits.
type heldConn struct{ conn *net.UnixConn }

func (c heldConn) say(m heldMessage) error {
	b, err := json.Marshal(m)
	if err == nil && len(b) > maxHeld {
		err = fmt.Errorf("%d bytes of variables, want at most %d", len(b), maxHeld)
	}
	if err == nil {
		_, err = c.conn.Write(b)
	}
	return err
}

// hear returns the next message. gone is true if the other end is closed.
func (c heldConn) hear() (m heldMessage, gone bool, err error) {
	buf := make([]byte, maxHeld)
	n, err := c.conn.Read(buf)
	if n == 0 && (err == nil || !errors.Is(err, os.ErrDeadlineExceeded)) {
		return m, true, nil // a packet is never empty
	}
	if err == nil {
		err = json.Unmarshal(buf[:n], &m)
	}
	if err == nil && m.Fault != "" {
		err = errors.New(m.Fault)
	}
	return m, false, err
}

// Close closes the connection. A process that still waits then ends.
func (c heldConn) Close() { _ = c.conn.Close() } // nothing is on its way

// Holder holds a process that waits until it is needed. One goroutine at a time may use it.
type Holder struct{ heldConn }

// NewHolder returns a Holder and the end of the process, which the caller passes on and closes. The
// caller closes the Holder.
func NewHolder() (Holder, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return Holder{}, nil, fmt.Errorf("socket: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "holder"), os.NewFile(uintptr(fds[1]), "held")
	conn, err := heldSocket(ours)
	if err != nil {
		return Holder{}, nil, errors.Join(err, theirs.Close())
	}
	return Holder{heldConn{conn}}, theirs, nil
}

// heldSocket makes a connection of a file, which it closes.
func heldSocket(f *os.File) (*net.UnixConn, error) {
	defer f.Close()
	c, err := net.FileConn(f)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("socket of type %T, want a unix socket", c), c.Close())
	}
	return conn, nil
}

// errHeldEnded means that a process has ended while it waited.
var errHeldEnded = errors.New("the process that waits for its start has ended")

// Ready returns when the process waits.
func (h Holder) Ready(until time.Time) error {
	if err := h.conn.SetReadDeadline(until); err != nil {
		return err
	}
	m, gone, err := h.hear()
	switch {
	case gone:
		return errHeldEnded
	case err == nil && !m.Ready:
		return errors.New("the process does not say that it waits")
	}
	return err
}

// Go lets the process run its program, with these variables in addition to those of its command. It
// returns when the program runs. After an error the process is of no use.
func (h Holder) Go(env map[string]string, until time.Time) error {
	if err := h.conn.SetDeadline(until); err != nil {
		return err
	}
	all := []string{}
	for name, value := range env {
		all = append(all, name+"="+value)
	}
	if err := h.say(heldMessage{Ready: true, Env: all}); err != nil {
		return err
	}
	begun := false
	for {
		m, gone, err := h.hear()
		switch {
		case err != nil:
			return err
		case gone && begun:
			return nil // the program's descriptors do not include the socket
		case gone:
			return errHeldEnded
		}
		begun = begun || m.Begun
	}
}

// Held is the end of a process that waits.
type Held struct{ heldConn }

// NewHeld returns the end that this process has as a descriptor. The caller closes it.
func NewHeld(fd int) (Held, error) {
	conn, err := heldSocket(os.NewFile(uintptr(fd), "held"))
	return Held{heldConn{conn}}, err
}

// Wait says that this process waits, and returns the variables that it gets when it is needed. If
// it is not needed any more, the error is [ErrNotNeeded].
func (h Held) Wait() (env []string, err error) {
	if err := h.say(heldMessage{Ready: true}); err != nil {
		return nil, err
	}
	m, gone, err := h.hear()
	if gone {
		return nil, ErrNotNeeded
	}
	return m.Env, err
}

// ErrNotNeeded means that a process that waits is not needed any more.
var ErrNotNeeded = errors.New("this process is not needed any more")

// Begun says that the program runs, or with an error that it does not, and closes h.
func (h Held) Begun(err error) {
	m := heldMessage{Begun: true}
	if err != nil {
		m = heldMessage{Fault: err.Error()}
	}
	_ = h.say(m) // if the holder has gone, nobody reads it
	h.Close()
}
