package hop

import (
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Pool keeps connections for the next exchange. The zero value keeps none.
type Pool struct {
	Max  int           // largest number of connections
	Idle time.Duration // how long a connection is kept

	// Waits is true if the other end sends [Ready] after an exchange. Until then it may still be
	// passing the answer on to a slow client, and the next exchange would wait for that.
	Waits bool

	mu     sync.Mutex
	closed bool
	kept   []kept // in order of use, the latest last
	timer  *time.Timer
}

type kept struct {
	net.Conn
	until time.Time
}

// Get returns the connection that was kept last, if it is still open and ready; nil: there is none.
func (p *Pool) Get() net.Conn {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	for i := len(p.kept) - 1; i >= 0; i-- {
		c := p.kept[i]
		is := broken
		if now.Before(c.until) {
			is = look(c.Conn, p.Waits)
		}
		if is == busy {
			continue
		}
		p.kept = slices.Delete(p.kept, i, i+1)
		if is == usable {
			return c.Conn
		}
		_ = c.Close()
	}
	return nil
}

// Put keeps a connection, or closes it.
func (p *Pool) Put(c net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.kept) >= p.Max {
		_ = c.Close()
		return
	}
	p.kept = append(p.kept, kept{c, time.Now().Add(p.Idle)})
	if p.timer == nil {
		p.timer = time.AfterFunc(p.Idle, p.expire)
	} else if len(p.kept) == 1 {
		p.timer.Reset(p.Idle)
	}
}

// expire closes connections that were kept for too long.
func (p *Pool) expire() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	p.kept = slices.DeleteFunc(p.kept, func(c kept) bool {
		old := !now.Before(c.until)
		if old {
			_ = c.Close()
		}
		return old
	})
	if len(p.kept) > 0 {
		p.timer.Reset(p.kept[0].until.Sub(now))
	}
}

// Close closes all kept connections. Later ones are closed at once.
func (p *Pool) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	if p.timer != nil {
		p.timer.Stop()
	}
	for _, c := range p.kept {
		_ = c.Close()
	}
	p.kept = nil
}

// Ready is the byte that the receiver of requests sends on a connection when it can take the next
// request (see [Pool.Waits]).
const Ready = '\n'

// condition says whether a kept connection can be used.
type condition int

const (
	broken condition = iota // not usable: it is closed, or has data that belongs to no exchange
	busy                    // usable later: the other end is not ready
	usable                  // usable now
)

// look returns a kept connection's condition, and reads what has arrived. A connection that was
// closed after Ready looks usable.
func look(c net.Conn, waits bool) (is condition) {
	s, ok := c.(syscall.Conn)
	if !ok {
		return usable // a pipe in a test
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return broken
	}
	err = raw.Control(func(fd uintptr) {
		var b [2]byte
		n, _, e := unix.Recvfrom(int(fd), b[:], unix.MSG_DONTWAIT)
		switch {
		case e == unix.EAGAIN && waits:
			is = busy
		case e == unix.EAGAIN, waits && e == nil && n == 1 && b[0] == Ready:
			is = usable
		}
	})
	if err != nil {
		return broken
	}
	return is
}
