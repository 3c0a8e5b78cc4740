package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"
)

// followAgain is the time between two attempts to read a node's lines.
const followAgain = 250 * time.Millisecond

// errClosedAtOnce means that a daemon accepts connections and closes them.
var errClosedAtOnce = errors.New("the daemon has closed the connection at once")

// unreachedError is why a daemon on another machine cannot be reached. It has not refused.
type unreachedError struct{ error }

// Unwrap returns the cause.
func (e unreachedError) Unwrap() error { return e.error }

// follow reads the lines that a node's replicas print from the daemon's socket, until the node
// leaves. The node joins when its socket answers.
//
// The lines of a node on another machine may end, and its daemon may be out of reach for the time
// DirectoryConfig.Reach. Then the node leaves, although its announcements still arrive over NATS,
// because no replica could be used there. The next announcement has the node followed again.
func (d *Directory) follow(m *member) {
	ctx, cancel := context.WithCancel(d.ctx)
	m.leave = cancel
	if d.cfg.Line == nil {
		d.joined(m)
		return
	}
	d.group.Go(func() {
		defer cancel()
		said, since := "", time.Now() // since when the lines have not been read
		for ctx.Err() == nil {
			began := time.Now()
			read, err := d.lines(ctx, m, time.Until(since.Add(d.cfg.Reach)))
			if read {
				since = time.Now()
			}
			if read && err == nil && since.Sub(began) < followAgain {
				err = errClosedAtOnce
			}
			if err != nil && ctx.Err() == nil && err.Error() != said {
				said = err.Error()
				d.cfg.Log.Warn("failed to read the lines of a node's output", "node", m.client.name, "error", err)
			}
			if errors.As(err, new(unreachedError)) && time.Since(since) >= d.cfg.Reach {
				d.post(func() { outOfReach(ctx, d, m, since, err) })
			}
			select {
			case <-ctx.Done():
			case <-time.After(followAgain):
			}
		}
	})
}

// outOfReach removes a node that is heard but cannot be reached. ctx ends when the node leaves. A
// node that has not joined yet is only shown as away.
func outOfReach(ctx context.Context, d *Directory, m *member, since time.Time, err error) {
	if ctx.Err() != nil {
		return
	}
	a := Absence{Since: since, Heard: true, Cause: "its announcements arrive over NATS, but its daemon cannot be reached: " + err.Error()}
	if m.joined {
		d.left(m.client.name, m, a) // its next announcement has it followed again
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if m.away == nil || !m.away.Heard {
		m.away = &a
	}
}

// lines passes on what comes over one connection. If the daemon is on another machine, within
// bounds the time until it is reached; 0 or less: socketTimeout does. read is true if it was
// reached.
func (d *Directory) lines(ctx context.Context, m *member, within time.Duration) (read bool, err error) {
	c, r, err := m.client.lines(ctx, &m.lines, within)
	if err != nil {
		return false, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	d.post(func() {
		if ctx.Err() == nil {
			d.joined(m)
		}
	})
	for {
		b, err := readLine(r)
		if errors.Is(err, errLongLine) {
			return true, err
		}
		if err != nil {
			return true, nil // the daemon has ended or is out of reach: the next attempt tells
		}
		l, err := decodeLine(b)
		if err != nil {
			return true, err
		}
		d.cfg.Line(m.client.name, l)
		m.lines.add(l.Number)
	}
}

// heardLines says which line of a daemon was heard last. It is safe for concurrent use.
type heardLines struct {
	mu     sync.Mutex
	daemon string // its id
	number uint64
}

// of returns the number of the latest line that was heard of a daemon. From now on, lines are of
// this daemon.
func (h *heardLines) of(daemon string) uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.daemon != daemon {
		h.daemon, h.number = daemon, 0
	}
	return h.number
}

func (h *heardLines) add(number uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.number = max(h.number, number)
}

func decodeLine(b []byte) (Line, error) {
	var l Line
	if err := json.Unmarshal(b, &l); err != nil {
		return Line{}, fmt.Errorf("line of output: %w", err)
	}
	return l, nil
}
