package tunnel

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"net"
	"sync"
)

// secured is a TLS connection.
type secured struct {
	*tls.Conn
	raw *gathering
}

// gathering is a connection that can gather what is written, so that several records of TLS take
// one system call.
type gathering struct {
	counted
	in *bufio.Reader

	mu     sync.Mutex
	gather bool
	out    []byte
}

// Read implements io.Reader.
func (g *gathering) Read(b []byte) (int, error) { return g.in.Read(b) }

// Write implements io.Writer.
func (g *gathering) Write(b []byte) (int, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.gather {
		g.out = append(g.out, b...)
		return len(b), nil
	}
	return g.counted.Write(b)
}

// counted is a connection whose bytes a Tunnel counts.
type counted struct {
	net.Conn
	t *Tunnel
}

// Read implements io.Reader.
func (c counted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.t.received.Add(uint64(n))
	return n, err
}

// Write implements io.Writer.
func (c counted) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.t.sent.Add(uint64(n))
	return n, err
}

// begin gathers what is written until flush.
func (g *gathering) begin() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.gather = true
}

func (g *gathering) flush() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.gather = false
	_, err := g.counted.Write(g.out)
	g.out = g.out[:0]
	return err
}

// readSize is how much is read at once, in bytes.
const readSize = 64 << 10

// secured returns TLS over raw, as one of its sides. Only TLS 1.3 is spoken.
func (t *Tunnel) secured(raw net.Conn, side func(net.Conn, *tls.Config) *tls.Conn, cfg *tls.Config) *secured {
	cfg = cfg.Clone()
	cfg.MinVersion = max(cfg.MinVersion, tls.VersionTLS13)
	cfg.DynamicRecordSizingDisabled = true // small records save latency of a page's first bytes only
	c := counted{raw, t}
	g := &gathering{counted: c, in: bufio.NewReaderSize(c, readSize)}
	return &secured{side(g, cfg), g}
}

// joined writes the header and the body of each frame of the multiplexer together. The multiplexer
// writes both one after the other, from one goroutine.
type joined struct {
	*secured
	begun bool       // a header has been written, and its body follows
	frame sync.Mutex // held while a frame is written
}

// Bytes of a header of the multiplexer: version, type, flags (2), stream (4), length (4).
const (
	headerLength = 12
	headerType   = 1 // 0: a body follows
	headerFlags  = 2
	headerStream = 4
	headerSize   = 8
)

// Types and flags of headers.
const (
	typeUpdate = 1 // of a window
	flagReset  = 8
)

// Write implements io.Writer.
func (j *joined) Write(b []byte) (int, error) {
	if j.begun {
		defer j.frame.Unlock()
		j.begun = false
		n, err := j.secured.Write(b)
		return n, errors.Join(err, j.raw.flush())
	}
	j.frame.Lock()
	if len(b) == headerLength && b[headerType] == 0 && binary.BigEndian.Uint32(b[headerSize:]) > 0 {
		j.raw.begin()
		n, err := j.secured.Write(b)
		if j.begun = err == nil; !j.begun { // Write is not called again
			j.frame.Unlock()
		}
		return n, err
	}
	defer j.frame.Unlock()
	return j.secured.Write(b)
}

// reset tells the peer that a stream has ended in both directions. The multiplexer has no method
// for it.
func (j *joined) reset(stream uint32) {
	var b [headerLength]byte
	b[headerType] = typeUpdate
	binary.BigEndian.PutUint16(b[headerFlags:], flagReset)
	binary.BigEndian.PutUint32(b[headerStream:], stream)
	j.frame.Lock()
	defer j.frame.Unlock()
	_, _ = j.secured.Write(b[:]) // fails if the connection has ended
}
