package gateway

import (
	"io"
	"net"
	"net/http"
)

// Strict returns a listener for an HTTP/1 server, in whose place requests that two servers could read in two ways are answered
// with 400 and their connection is closed. The server's ConnState is to be [Unframed].
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

// Unframed is told by a server that a connection speaks another protocol from now on.
func Unframed(c net.Conn, s http.ConnState) {
	if c, ok := c.(*strictConn); ok && s == http.StateHijacked { // by then nobody reads it
		c.raw = true
	}
}

// strictConn lets a server read what its framing passes. It stays a TCP connection with all that the server makes of one.
type strictConn struct {
	*net.TCPConn
	framing framing
	raw     bool   // what comes is no HTTP
	bad     bool   // the rest is
	refusal string // what of it is to be read
}

// refusal is what a server reads in place of what is bad, and then the end. Neither in a head nor between chunks can it be
// read as something: net/http answers 400, after the answers to the requests before, and closes. An error would tell it that
// the client is gone.
const refusal = "\r?\r\n?\r\n\r\n"

// Read implements io.Reader.
func (c *strictConn) Read(b []byte) (int, error) {
	if !c.bad {
		n, err := c.TCPConn.Read(b)
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
