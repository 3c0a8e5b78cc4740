package hop

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
)

// Bytes returns the request as it is sent on a connection. r.All must hold the whole body. The
// argument is the largest accepted size; if the request is larger, Bytes returns nil.
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

// Pass does the work of [Do] for an answer that is already in memory, as the bytes that a
// connection would carry.
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

// Flusher is a connection that buffers writes. Flush sends the buffer at once.
type Flusher interface {
	net.Conn
	Flush() error
}

// Run does the work of Serve for a request that is already in memory. Its handler cannot hijack c,
// which nobody reads.
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
	out.Kept = out.Whole // however much the handler has read of the request
	return out
}

// waits reports whether the next Read of an answer may block: nothing is buffered, and the answer
// comes on a connection.
func (r *reader) waits() bool {
	if r.r.Buffered() > 0 {
		return false
	}
	_, ok := r.from.(net.Conn)
	return ok
}

// deliver sends the written part of an answer, wherever it is buffered.
func (x *exchange) deliver() error {
	if err := x.flush(); err != nil || x.keeps == nil {
		return err
	}
	x.failed = x.keeps.Flush()
	return x.failed
}
