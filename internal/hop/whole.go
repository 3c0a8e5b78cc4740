package hop

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
)

// Bytes returns the request as it goes out on a connection. All has to have the whole body. It returns nil if that takes more than most
// bytes.
func (r *Request) Bytes(most int) ([]byte, error) {
	head, err := r.head()
	if err != nil {
		return nil, err
	}
	defer head.give()
	n := len(head.b) + len(r.All)
	if n > most {
		return nil, nil
	}
	return append(append(make([]byte, 0, n), head.b...), r.All...), nil
}

// Pass is Do for an answer that is here already, as it would have come on a connection.
func (r *Request) Pass(w http.ResponseWriter, answer []byte) (out Result) {
	in := takeReader(bytes.NewReader(answer))
	defer in.give()
	resp, err := http.ReadResponse(in.r, r.In)
	if err == nil && resp.StatusCode < 200 {
		err = fmt.Errorf("status %d, want a final one", resp.StatusCode)
	}
	if err != nil {
		return Result{Err: err}
	}
	in.left = -1
	return Result{Begun: true, Err: r.answer(w, resp, in)}
}

// Flusher is a connection that keeps what is written to it. Flush sends that, because its reader is not to wait for more.
type Flusher interface {
	net.Conn
	Flush() error
}

// Run is Serve for a request that is here already. Its handler cannot hijack c, which nobody reads.
func (s *Server) Run(ctx context.Context, c Flusher, request []byte) (out Served) {
	in := takeReader(bytes.NewReader(request))
	x := &exchange{s: s, c: c, in: in, keeps: c}
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer func() {
		if !stop() {
			out.Kept = false
		}
		in.give()
	}()
	r, err := http.ReadRequest(in.r)
	if err != nil {
		return Served{Silent: true}
	}
	x.begin(r)
	if n := int(r.ContentLength); n > 0 && n <= len(request) {
		x.body.whole = request[len(request)-n:]
	}
	out = x.run(r.WithContext(ctx))
	out.Kept = out.Whole // whatever the handler has read of the request
	return out
}

// waits tells whether the next Read of an answer may wait for more of it: nothing is buffered, and it comes on a connection.
func (r *reader) waits() bool {
	if r.r.Buffered() > 0 {
		return false
	}
	_, ok := r.from.(net.Conn)
	return ok
}

// deliver sends what has been written so far of an answer, wherever it is kept.
func (x *exchange) deliver() error {
	if err := x.flush(); err != nil || x.keeps == nil {
		return err
	}
	x.failed = x.keeps.Flush()
	return x.failed
}
