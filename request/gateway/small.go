package gateway

import (
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/hop"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// A small exchange travels with its task (docs/adr/0068): the request is the task's input and the
// answer its output. The replica goes to the rendezvous only if its answer streams or is too large.

// enclose puts a request into its task if the request is small and has arrived completely.
func enclose(req *task.Request, r *http.Request, c *call, body *source) {
	h := r.Header
	if r.ContentLength < 0 || r.ContentLength > task.MaxMessage || r.Method == http.MethodConnect || h["Upgrade"] != nil || h["Expect"] != nil {
		return
	}
	out := (&exchange{c: c}).request(r)
	if r.ContentLength > 0 {
		if out.All = body.all(); out.All == nil {
			return
		}
	}
	// If the body is broken, the rendezvous reports it.
	if b, err := out.Bytes(task.MaxMessage); err == nil && b != nil {
		req.Input = tensor.Activation{{ContentType: task.TypeRequest, Bytes: b}}
	}
}

// answering is a connection from a replica that already has the request from its task.
type answering struct{ net.Conn }

// meets starts an attempt on a connection that came to the rendezvous.
func meets(c *call, conn net.Conn) *exchange {
	x := &exchange{c: c, conn: conn, wait: time.Since(c.start)}
	if a, ok := conn.(answering); ok {
		x.conn, x.there = a.Conn, true
	}
	return x
}

// worked subtracts the function's working time from the time that the request waited. If the
// request travelled with its task, the watchdog's answer has the working time.
func (x *exchange) worked(r *http.Response) {
	if !x.there {
		return // any such header is the function's own
	}
	if d, err := time.ParseDuration(r.Header.Get(task.HeaderDirect)); err == nil && d > 0 {
		x.wait = max(x.wait-d, 0)
	}
}

// passAnswer sends the client the answer that came with the end of the task. It returns false if no
// answer came.
func (g *Gateway) passAnswer(w http.ResponseWriter, r *http.Request, c *call, resp *task.Response) (status int, ok bool) {
	if resp == nil || len(resp.Output) != 1 || len(resp.Output[0].Items) != 1 || resp.Output[0].Items[0].ContentType != task.TypeResponse {
		return 0, false
	}
	c.calls = resp.Stages
	out := *r // hop reads the method of the copy
	x := &exchange{c: c, there: true, wait: time.Since(c.start)}
	delete(w.Header(), "X-Call-Id") // the answer has its own
	result := (&hop.Request{In: &out, Answer: x.answer}).Pass(w, resp.Output[0].Items[0].Bytes)
	switch {
	case result.Err == nil:
		return x.status, true
	case result.Begun:
		c.broken, c.cause = true, "the answer broke off: "+result.Err.Error()
		return x.status, true
	}
	return fail(w, c, &task.Error{Status: http.StatusBadGateway, Internal: true, Stage: c.name, Cause: fmt.Sprintf("the replica's answer: %v", result.Err)}), true
}
