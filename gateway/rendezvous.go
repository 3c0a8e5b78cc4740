package gateway

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Rendezvous is where replicas of functions that speak HTTP meet the gateway's requests: a unix socket that replicas dial, each
// with the token of the request that its task is about.
type Rendezvous struct {
	listener net.Listener
	path     string
	log      *slog.Logger
	hands    chan struct{} // bounds greetings under way
	running  sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	waiting  map[string]*meeting // by token
	greeting map[net.Conn]struct{}
}

// Bounds of greetings: a token is there at once, unless somebody dials who has none.
const (
	maxGreetings = 256
	greetingTime = 5 * time.Second
	tokenSize    = 26 // of rand.Text
)

// MaxFolder is the longest path in bytes of a rendezvous's folder: that of a unix socket in it may have 107.
const MaxFolder = 107 - len("/http")

// NewRendezvous listens in folder, which becomes this user's alone. A socket that a process before this one left there is
// replaced. The caller closes it.
func NewRendezvous(folder string, log *slog.Logger) (*Rendezvous, error) {
	folder, err := filepath.Abs(folder)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	path := filepath.Join(folder, "http")
	if len(folder) > MaxFolder || strings.Contains(folder, "\n") {
		return nil, fmt.Errorf("rendezvous: folder %q, want a path of at most %d bytes in one line: choose another folder", folder, MaxFolder)
	}
	if err := os.MkdirAll(folder, 0o700); err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	if err := os.Chmod(folder, 0o700); err != nil { //nolint:gosec // a folder
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	if err := os.Remove(path); err != nil && !os.IsNotExist(err) {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("rendezvous: %w", err)
	}
	v := &Rendezvous{
		listener: l, path: path, log: log, hands: make(chan struct{}, maxGreetings),
		waiting: map[string]*meeting{}, greeting: map[net.Conn]struct{}{},
	}
	v.running.Go(v.accept)
	return v, nil
}

// Close stops to listen. Meetings under way go on.
func (v *Rendezvous) Close() {
	_ = v.listener.Close() // which removes the socket
	v.mu.Lock()
	v.closed = true
	for c := range v.greeting {
		_ = c.Close()
	}
	v.mu.Unlock()
	v.running.Wait()
}

func (v *Rendezvous) accept() {
	for {
		v.hands <- struct{}{}
		c, err := v.listener.Accept()
		if err != nil {
			<-v.hands
			if errors.Is(err, net.ErrClosed) {
				return
			}
			v.log.Error("a replica could not be met", "error", err) // out of descriptors: they come back
			time.Sleep(acceptPause)
			continue
		}
		v.running.Go(func() {
			defer func() { <-v.hands }()
			v.greet(c)
		})
	}
}

// acceptPause is how long a listener that fails is left alone.
const acceptPause = 10 * time.Millisecond

// greet reads the token and hands the connection to whom it is for.
func (v *Rendezvous) greet(c net.Conn) {
	v.mu.Lock()
	if v.closed {
		v.mu.Unlock()
		_ = c.Close()
		return
	}
	v.greeting[c] = struct{}{}
	v.mu.Unlock()
	var token [tokenSize + 1]byte
	err := c.SetReadDeadline(time.Now().Add(greetingTime))
	if err == nil {
		_, err = io.ReadFull(c, token[:])
	}
	if err == nil {
		err = c.SetReadDeadline(time.Time{})
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.greeting, c)
	m := v.waiting[string(token[:tokenSize])]
	if err != nil || m == nil || token[tokenSize] != '\n' {
		_ = c.Close() // a stranger, or too late
		return
	}
	select {
	case m.conns <- c:
	default:
		_ = c.Close() // more than attempts of one task
	}
}

// meeting is one request that waits for its replica: for one after the other, when replicas are lost.
type meeting struct {
	v     *Rendezvous
	token string
	conns chan net.Conn
}

// meet begins to wait. The caller closes the meeting.
func (v *Rendezvous) meet() *meeting {
	m := &meeting{v: v, token: rand.Text(), conns: make(chan net.Conn, 4)}
	v.mu.Lock()
	v.waiting[m.token] = m
	v.mu.Unlock()
	return m
}

// address is what the replica is told.
func (m *meeting) address() string { return "unix " + m.token + " " + m.v.path }

func (m *meeting) close() {
	m.v.mu.Lock()
	delete(m.v.waiting, m.token)
	m.v.mu.Unlock()
	for {
		select {
		case c := <-m.conns:
			_ = c.Close() // it came too late
		default:
			return
		}
	}
}
