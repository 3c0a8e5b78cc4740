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

// Rendezvous is the place where replicas of functions that speak HTTP meet the gateway's requests.
// It is a unix socket. A replica dials it and sends the token from its task, which selects the
// request.
type Rendezvous struct {
	listener net.Listener
	path     string
	control  string // name of this control plane, for replicas on other machines; empty: none
	log      *slog.Logger
	hands    chan struct{} // bounds concurrent greetings
	running  sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	waiting  map[string]*meeting // by token
	greeting map[net.Conn]struct{}
	kept     int // kept connections that wait for their next token
}

// Bounds for connections that wait for a token. On a new connection the token arrives at once,
// unless the replica has no processor. Replicas close kept connections earlier.
const (
	maxGreetings = 256 // new connections
	maxKept      = 4096
	greetingTime = time.Minute
	tokenSize    = 26 // length of rand.Text in bytes
)

// MaxFolder is the longest path of a rendezvous's folder in bytes, because a unix socket's path may
// have 107.
const MaxFolder = 107 - len("/http")

// NewRendezvous listens in folder and makes the folder accessible to this user only. It replaces a
// socket left by an earlier process. The caller closes the Rendezvous.
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

// Name tells replicas on other machines the name of this control plane, with which their node finds
// it. It must be called before the first request.
func (v *Rendezvous) Name(control string) { v.control = control }

// Serve takes a connection of a replica on another machine. It returns when the replica has said
// its token, or did not in time. After that, the connection belongs to the request.
func (v *Rendezvous) Serve(c net.Conn) {
	select {
	case v.hands <- struct{}{}:
	case <-time.After(greetingTime):
		_ = c.Close()
		return
	}
	defer func() { <-v.hands }()
	v.mu.Lock()
	if v.closed {
		v.mu.Unlock()
		_ = c.Close()
		return
	}
	v.running.Add(1)
	v.mu.Unlock()
	defer v.running.Done()
	if v.begin(c, false) {
		v.greet(c)
	}
}

// Close stops listening and closes connections that wait for a token. Exchanges in progress
// continue.
func (v *Rendezvous) Close() {
	_ = v.listener.Close() // also removes the socket
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
			// Descriptors ran out; they become free again.
			v.log.Error("failed to accept a replica's connection", "error", err)
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

// acceptPause is the wait after a failed accept.
const acceptPause = 10 * time.Millisecond

// ready tells a replica that its connection waits for the next token.
var ready = []byte{hop.Ready}

// keep tells the replica that its connection can be used again, and waits for the next token on it.
// A replica may be done long before a slow client has the whole answer. It may have got tokens of
// other requests since then, and may send any of them, as on a new connection.
func (v *Rendezvous) keep(c net.Conn) {
	if !v.begin(c, true) {
		return
	}
	// greet sees the same error. The write does not block: the replica reads, or closes the
	// connection.
	_, _ = c.Write(ready)
	go func() {
		defer v.running.Done()
		v.greet(c)
		v.mu.Lock()
		v.kept--
		v.mu.Unlock()
	}()
}

// begin registers a connection that waits for its token and gives it greetingTime. It closes the
// connection if there is no room. If it returns true, v.running counts the connection.
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
	// If the connection has ended, greet sees the error.
	_ = c.SetDeadline(time.Now().Add(greetingTime))
	return true
}

// greet reads the token and hands the connection to its meeting.
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
		_ = c.Close() // unknown token, or too late
		return
	}
	met := c
	if mark == '+' {
		met = answering{c}
	}
	select {
	case m.conns <- met:
	default:
		_ = c.Close() // more connections than one task has attempts
	}
}

// meeting is one request that waits for its replica. After a lost replica, it waits for the next
// one.
type meeting struct {
	v     *Rendezvous
	token string
	conns chan net.Conn
}

// meet registers a meeting. The caller closes it.
func (v *Rendezvous) meet() *meeting {
	m := &meeting{v: v, token: rand.Text(), conns: make(chan net.Conn, 4)}
	v.mu.Lock()
	v.waiting[m.token] = m
	v.mu.Unlock()
	return m
}

// address returns the text that tells the replica where to go.
func (m *meeting) address() string {
	if m.v.control != "" {
		return "unix+tls " + m.token + " " + m.v.control + " " + m.v.path
	}
	return "unix " + m.token + " " + m.v.path
}

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
