package gateway

import (
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/hop"
	"github.com/stagecoach-serving/stagecoach/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// A small exchange travels with its task (docs/adr/0068): the request is the task's input, and the answer is its output. The
// replica comes to the rendezvous only with an answer that streams or is too large.

// enclose puts a request into its task if it is small and all of it is here.
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
	if b, err := out.Bytes(task.MaxMessage); err == nil && b != nil { // the rendezvous tells what is wrong with it
		req.Input = tensor.Activation{{ContentType: task.TypeRequest, Bytes: b}}
	}
}

// answering is a connection of a replica that has the request from its task.
type answering struct{ net.Conn }

// meets begins an attempt on a connection that came to the rendezvous.
func meets(c *call, conn net.Conn) *exchange {
	x := &exchange{c: c, conn: conn, wait: time.Since(c.start)}
	if a, ok := conn.(answering); ok {
		x.conn, x.there = a.Conn, true
	}
	return x
}

// worked takes how long the function has worked off the time that the request waited. The watchdog says so in its answer if the request
// came with the task.
func (x *exchange) worked(r *http.Response) {
	if !x.there {
		return // it would be the function's word
	}
	if d, err := time.ParseDuration(r.Header.Get(task.HeaderDirect)); err == nil && d > 0 {
		x.wait = max(x.wait-d, 0)
	}
}

// passAnswer answers the client with what came with the task's end. It returns false if no answer came.
func (g *Gateway) passAnswer(w http.ResponseWriter, r *http.Request, c *call, resp *task.Response) (status int, ok bool) {
	if resp == nil || len(resp.Output) != 1 || len(resp.Output[0].Items) != 1 || resp.Output[0].Items[0].ContentType != task.TypeResponse {
		return 0, false
	}
	c.calls = resp.Stages
	out := *r // hop reads its method
	x := &exchange{c: c, there: true, wait: time.Since(c.start)}
	delete(w.Header(), "X-Call-Id") // the answer brings it
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
