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

	"github.com/stagecoach-serving/stagecoach/internal/hop"
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
	kept     int // of those that are greeted: after an exchange, and not for the first time
}

// Bounds of connections that wait for a token. On a new connection the token comes at once, unless the replica gets no processor.
// Replicas close kept connections sooner.
const (
	maxGreetings = 256 // new connections
	maxKept      = 4096
	greetingTime = time.Minute
	tokenSize    = 26 // bytes, of rand.Text
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

// Close stops to listen, and closes connections that wait for a token. Meetings under way go on.
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
			if v.begin(c, false) {
				v.greet(c)
			}
		})
	}
}

// acceptPause is how long a listener that fails is left alone.
const acceptPause = 10 * time.Millisecond

// ready tells a replica that a connection waits for its next token.
var ready = []byte{hop.Ready}

// keep waits for the next token on a connection whose exchange has ended, and tells the replica, which may have been done long
// before a slow client had its answer. The replica may have it ask for any request whose token it was given since, as with a
// connection that it dials.
func (v *Rendezvous) keep(c net.Conn) {
	if !v.begin(c, true) {
		return
	}
	_, _ = c.Write(ready) // greet has the error, too; it does not wait, because the replica has read the request or closes
	go func() {
		defer v.running.Done()
		v.greet(c)
		v.mu.Lock()
		v.kept--
		v.mu.Unlock()
	}()
}

// begin takes note that a connection is greeted, and gives it greetingTime; or it closes it. If it is kept, v.running counts it.
func (v *Rendezvous) begin(c net.Conn, kept bool) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.closed || kept && v.kept >= maxKept {
		_ = c.Close()
		return false
	}
	if kept {
		v.kept++
		v.running.Add(1)
	}
	v.greeting[c] = struct{}{}
	_ = c.SetDeadline(time.Now().Add(greetingTime)) // of a connection that has ended, greet has the error
	return true
}

// greet reads the token and hands the connection to whom it is for.
func (v *Rendezvous) greet(c net.Conn) {
	var token [tokenSize + 1]byte
	_, err := io.ReadFull(c, token[:])
	if err == nil {
		err = c.SetDeadline(time.Time{})
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.greeting, c)
	m := v.waiting[string(token[:tokenSize])]
	mark := token[tokenSize]
	if err != nil || m == nil || mark != '\n' && mark != '+' {
		_ = c.Close() // a stranger, or too late
		return
	}
	met := c
	if mark == '+' {
		met = answering{c}
	}
	select {
	case m.conns <- met:
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
