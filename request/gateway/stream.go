package gateway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/hop"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// exchange is one attempt to run a request on a function that speaks HTTP.
type exchange struct {
	c      *call
	conn   net.Conn      // to the replica; hop.Do closes it
	there  bool          // the replica has the request
	wait   time.Duration // time that the request waited for the replica
	status int           // of the answer; 0: no answer came
	err    error         // why no answer came
}

// request returns the request for the function: the client's, with the path after the function's
// name.
func (x *exchange) request(r *http.Request) *hop.Request {
	c, from := x.c, origin(r)
	target := c.path
	if r.URL.RawQuery != "" {
		target += "?" + r.URL.RawQuery
	}
	header := []hop.Field{
		{Name: "X-Forwarded-For", Value: from.client},
		{Name: "X-Forwarded-Host", Value: from.host},
		{Name: "X-Forwarded-Proto", Value: from.proto},
		{Name: "X-Call-Id", Value: c.id},
		{Name: "X-Start-Time", Value: startTime(c)},
		{Name: "Forwarded"},
		{Name: "Expect"},
		{Name: "X-Callback-Url"},
		{Name: task.HeaderDirect},
		{Name: "Traceparent", Value: c.traceparent},
	}
	if c.traceparent == "" { // keep the client's traceparent
		header = header[:len(header)-1]
	}
	return &hop.Request{In: r, Target: target, Host: r.Host, Header: header, Answer: x.answer}
}

// answer records the function's answer and sets the platform's headers in it.
func (x *exchange) answer(r *http.Response) {
	x.status = r.StatusCode
	x.c.upload.close()
	x.worked(r)
	for _, name := range [...]string{"X-Openfaas-Internal", "X-Call-Id", "X-Start-Time", "X-Duration-Seconds", droppedHeader, task.HeaderDirect} {
		delete(r.Header, name) // only the platform sets them
	}
	stamp(r.Header, x.c)
	timing := serverTiming([]task.Timing{{Stage: x.c.key.Name, Wait: x.wait}})
	// The working time is not known yet.
	timing, _, _ = strings.Cut(timing, ", ")
	// Keep the function's own.
	r.Header["Server-Timing"] = append([]string{timing}, r.Header["Server-Timing"]...)
}

// forwarded holds where a request came from, as OpenFaaS's gateway reports it.
type forwarded struct{ client, host, proto string }

// origin returns where a request came from, including what a proxy reported.
func origin(r *http.Request) forwarded {
	f := forwarded{r.RemoteAddr, r.Host, "http"}
	if host, _, err := net.SplitHostPort(r.RemoteAddr); err == nil {
		f.client = host
	}
	if given := r.Header["X-Forwarded-For"]; len(given) > 0 {
		f.client = given[len(given)-1] + ", " + f.client
	}
	if given := r.Header["X-Forwarded-Host"]; len(given) > 0 {
		f.host = given[0]
	}
	if given := r.Header["X-Forwarded-Proto"]; len(given) > 0 {
		f.proto = given[0]
	}
	return f
}

// taskEnd is the outcome of a request's task.
type taskEnd struct {
	resp *task.Response
	err  *task.Error
}

// settleTime is how long to wait for the end of a task whose exchange has ended.
const settleTime = 100 * time.Millisecond

// stream runs a request of a function that speaks HTTP. Its task waits for a replica like any
// other. A small exchange travels with the task (see small.go). In all other cases, the replica
// comes to the rendezvous, and the HTTP exchange runs there.
func (g *Gateway) stream(w http.ResponseWriter, r *http.Request, c *call) int {
	timeout, terr := g.timeout(c, r.Header.Get("X-Timeout"))
	if terr != nil {
		return fail(w, c, terr)
	}
	meet := g.cfg.Rendezvous.meet()
	defer meet.close()
	req := task.Request{
		ID: c.id + "." + g.ids.next(), Target: c.key.String(), Deadline: c.start.Add(timeout), Arrived: c.start,
		Input: tensor.Activation{{}}, Direct: true, Body: r.ContentLength,
		Header: []task.Header{{Name: task.HeaderDirect, Value: meet.address()}, {Name: "X-Call-Id", Value: c.id}},
	}
	for _, v := range r.Header[task.HeaderVariants] { // the coordinator reads it
		req.Header = append(req.Header, task.Header{Name: task.HeaderVariants, Value: v})
	}
	if t := r.Header.Get("Traceparent"); validTrace(t) {
		req.Traceparent = t
	}
	trace(&req, c.trace)
	c.traceparent = req.Traceparent

	ctx, cancel := context.WithCancel(r.Context())
	talk, endExchange := context.WithCancelCause(r.Context())
	defer endExchange(nil)
	end := make(chan taskEnd, 1)
	body := g.source(w, r, c)
	invoke := func() {
		enclose(&req, r, c, body)
		resp, err := g.cfg.Invoker.Invoke(ctx, req)
		if err != nil {
			endExchange(err) // no answer is needed any more
		}
		end <- taskEnd{resp, err}
		close(end)
	}
	_ = http.NewResponseController(w).EnableFullDuplex() // functions may answer while they read
	if r.ContentLength == 0 {
		go invoke()
	} else {
		c.upload = &upload{g: g, function: c.key, body: body, invoke: invoke, endExchange: endExchange, cancel: cancel, end: end}
		from := r
		if r.ContentLength < 0 { // net/http sets the trailer when the body ends
			r = r.WithContext(r.Context())
			r.Trailer = maps.Clone(from.Trailer)
		}
		c.upload.watch(from)
	}
	defer func() { // must not run before the goroutine has started
		c.upload.close()
		cancel()
		if o, ok := <-end; ok && o.resp != nil {
			c.calls = o.resp.Stages
		}
	}()
	code := g.talk(talk, w, r, c, body, meet, end)
	if !c.broken && code != statusClientGone {
		// After a switch of protocols the connection is not net/http's any more, and a flush would
		// panic.
		if code != http.StatusSwitchingProtocols {
			// The client need not wait for the bookkeeping. If it is gone, the error does not
			// matter.
			_ = http.NewResponseController(w).Flush()
		}
		meet.close()
		settle(end, c)
	}
	return code
}

// settle waits for the task's end, at most settleTime. The client has its whole answer. But if the
// replica was lost before it ended the task, the task runs again, which can take long.
func settle(end <-chan taskEnd, c *call) {
	t := time.NewTimer(settleTime)
	defer t.Stop()
	select {
	case o := <-end:
		if o.resp != nil {
			c.calls = o.resp.Stages
		}
	case <-t.C:
	}
}

// talk answers the client with the answer of the replica that comes to the meeting. If that replica
// is lost and the request can be tried again, the next replica answers.
func (g *Gateway) talk(ctx context.Context, w http.ResponseWriter, r *http.Request, c *call, body *source, meet *meeting, end <-chan taskEnd) int {
	parent := c.traceparent
	for attempt := uint8(1); ; attempt++ {
		select {
		case o := <-end:
			if terr := c.upload.refusal(); terr != nil {
				return failed(w, c, terr)
			}
			if r.Context().Err() != nil { // also ends a body that was read ahead
				return failed(w, c, g.bodyFault(r.Context(), body))
			}
			if o.err == nil {
				if status, ok := g.passAnswer(w, r, c, o.resp); ok {
					return status
				}
				o.err = &task.Error{Status: http.StatusBadGateway, Internal: true, Stage: c.name, Cause: "the replica ended the request without an answer; if the function's image has changed, deploy it again"}
			}
			return fail(w, c, o.err)
		case conn := <-meet.conns:
			c.upload.meets()
			x := meets(c, conn)
			if c.trace != nil {
				// The traceparent of the request's only call.
				c.traceparent = task.CallParent(parent, 1, attempt)
			}
			release := g.exchange(ctx, w, r, x, body)
			if x.err == nil || c.broken {
				release()
				return x.status
			}
			terr := g.missed(ctx, r, x, body)
			release()
			if terr != nil {
				return failed(w, c, terr)
			}
		}
	}
}

// failed is fail for an error that may mean that the client is gone.
func failed(w http.ResponseWriter, c *call, terr *task.Error) int {
	if terr.Status == statusClientGone {
		return statusClientGone
	}
	return fail(w, c, terr)
}

// exchange runs one HTTP exchange with a replica. Afterwards, x holds its status or error, or
// c.broken is set. A Read that waits for the client holds the lock of the body's state. So if ctx
// ends before the caller has called release, the Read is cut short.
func (g *Gateway) exchange(ctx context.Context, w http.ResponseWriter, r *http.Request, x *exchange, body *source) (release func()) {
	release = func() {}
	out := *r
	req := x.request(&out)
	if req.There = x.there; !req.There && r.ContentLength != 0 {
		if r.ContentLength > 0 {
			req.All = body.all()
		}
		if req.All == nil {
			out.Trailer = maps.Clone(r.Trailer)
			again := body.again(out.Trailer)
			defer again.Close()
			stop := context.AfterFunc(ctx, body.cut)
			release = func() {
				if stop(); ctx.Err() != nil {
					body.cut() // the AfterFunc may have been stopped before it ran
				}
			}
			out.Body = again
		}
	}
	delete(w.Header(), "X-Call-Id") // the answer has its own
	result := hop.Do(ctx, x.conn, w, req)
	if result.Sent != nil {
		x.c.sending = append(x.c.sending, result.Sent)
	}
	switch {
	case result.Kept:
		g.cfg.Rendezvous.keep(x.conn)
	case result.Err == nil:
	case !result.Begun:
		x.err = result.Err
	default:
		x.c.broken, x.c.cause = true, "the answer broke off"
		if cause := context.Cause(ctx); cause != nil {
			x.c.cause += ": " + cause.Error()
		}
	}
	return release
}

// missed returns the client's error for an exchange without an answer, or nil if the next replica
// may try.
func (g *Gateway) missed(ctx context.Context, r *http.Request, x *exchange, body *source) *task.Error {
	fault := g.bodyFault(r.Context(), body) // may wait for the client until ctx ends
	var terr *task.Error
	if errors.As(context.Cause(ctx), &terr) && terr.Status != statusClientGone {
		return terr // whatever the state of the body
	}
	if fault != nil {
		return fault // a silent client is also treated as gone
	}
	if terr != nil {
		return terr
	}
	if sent, lost, _ := body.state(); lost {
		return &task.Error{
			Status: http.StatusBadGateway, Internal: true, Stage: x.c.name,
			Cause: fmt.Sprintf("the replica was lost after it got %d bytes of the body and before it answered: %v; not tried again, because these bytes were not kept", sent, x.err),
		}
	}
	return nil
}

// bodyFault returns the client's error for a body that broke off or a client that is gone, or nil.
// ctx is the request's.
func (g *Gateway) bodyFault(ctx context.Context, body *source) *task.Error {
	sent, _, err := body.state()
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded): // a gone client also ends the request's context
		return &task.Error{Status: http.StatusRequestTimeout, Cause: fmt.Sprintf("body: nothing came for %v after %d bytes", g.cfg.Stall, sent)}
	case ctx.Err() != nil:
		return &task.Error{Status: statusClientGone, Cause: "the client is gone"}
	case err != nil:
		return &task.Error{Status: http.StatusBadRequest, Cause: fmt.Sprintf("body: after %d bytes: %v", sent, err)}
	}
	return nil
}
