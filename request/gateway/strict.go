package gateway

import (
	"io"
	"net"
	"net/http"
)

// Strict returns a listener for an HTTP/1 server. Requests that two servers could read differently
// get 400, and their connection is closed. Set the server's ConnState to [Unframed].
func Strict(l *net.TCPListener) net.Listener { return strict{l} }

type strict struct{ *net.TCPListener }

// Accept implements net.Listener.
func (l strict) Accept() (net.Conn, error) {
	c, err := l.AcceptTCP()
	if err != nil {
		return nil, err
	}
	return &strictConn{TCPConn: c}, nil
}

// StrictConn does for another connection than one of TCP what Strict does for those of a listener.
func StrictConn(c net.Conn) net.Conn { return &strictStream{Conn: c} }

// Unframed stops the checks on a connection that switches to another protocol.
func Unframed(c net.Conn, s http.ConnState) {
	if s != http.StateHijacked {
		return
	}
	switch c := c.(type) { // nobody reads at this point
	case *strictConn:
		c.raw = true
	case *strictStream:
		c.raw = true
	}
}

// strictConn lets a server read what framing passes. It embeds the TCP connection, so that the
// server can use all that TCP connections have.
type strictConn struct {
	*net.TCPConn
	strictly
}

// strictStream is the same for another connection.
type strictStream struct {
	net.Conn
	strictly
}

// strictly is what a strict connection knows of the bytes that were read.
type strictly struct {
	framing framing
	raw     bool   // not HTTP any more
	bad     bool   // the remaining bytes are bad
	refusal string // what is still to be read of refusal
}

// refusal is the text that the server reads in place of bad bytes, followed by EOF. It is invalid
// both in a head and between chunks. So net/http answers earlier requests, then sends 400 and
// closes the connection. With a read error instead, net/http would treat the client as gone.
const refusal = "\r?\r\n?\r\n\r\n"

// Read implements io.Reader.
func (c *strictConn) Read(b []byte) (int, error) { return c.read(c.TCPConn, b) }

// Read implements io.Reader.
func (c *strictStream) Read(b []byte) (int, error) { return c.read(c.Conn, b) }

func (c *strictly) read(from net.Conn, b []byte) (int, error) {
	if !c.bad {
		n, err := from.Read(b)
		if c.raw {
			return n, err
		}
		k, bad := c.framing.pass(b[:n])
		if !bad {
			return n, err
		}
		c.bad, c.refusal = true, refusal
		if k > 0 {
			return k, nil
		}
	}
	if n := copy(b, c.refusal); n > 0 {
		c.refusal = c.refusal[n:]
		return n, nil
	}
	return 0, io.EOF
}
