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
	Max  int           // connections at most
	Idle time.Duration // that one is kept

	mu     sync.Mutex
	closed bool
	kept   []kept // the one that was used last is the last
	timer  *time.Timer
}

type kept struct {
	net.Conn
	until time.Time
}

// Get returns the connection that was kept last and is still open at its other end; nil: there is none.
func (p *Pool) Get() net.Conn {
	for {
		p.mu.Lock()
		n := len(p.kept) - 1
		if n < 0 {
			p.mu.Unlock()
			return nil
		}
		c := p.kept[n]
		p.kept[n] = kept{}
		p.kept = p.kept[:n]
		p.mu.Unlock()
		if time.Now().Before(c.until) && quiet(c.Conn) {
			return c.Conn
		}
		_ = c.Close()
	}
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

// expire closes what was kept for long enough.
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

// Close closes what is kept. Nothing is kept afterwards.
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

// quiet tells whether a connection is open and nothing has come on it: what comes between two exchanges belongs to neither.
func quiet(c net.Conn) bool {
	s, ok := c.(syscall.Conn)
	if !ok {
		return true // a pipe in a test
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return false
	}
	alone := false
	err = raw.Control(func(fd uintptr) {
		var b [1]byte
		_, _, e := unix.Recvfrom(int(fd), b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
		alone = e == unix.EAGAIN
	})
	return err == nil && alone
}
