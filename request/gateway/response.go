package gateway

import (
	"errors"
	"fmt"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// statusClientGone is the status of requests whose client left before the answer.
const statusClientGone = 499

// succeed writes a response and returns its status.
func (g *Gateway) succeed(w http.ResponseWriter, c *call, resp *task.Response) int {
	c.calls = resp.Stages
	a, terr := answer(c.inference, resp.Output)
	if terr != nil {
		return fail(w, c, terr)
	}
	h := w.Header()
	for _, f := range resp.Header {
		if name := textproto.CanonicalMIMEHeaderKey(f.Name); fromTheFunction(name) {
			h[name] = append(h[name], f.Value)
		}
	}
	h["Content-Type"] = []string{a.ContentType}
	h["Content-Length"] = []string{strconv.Itoa(len(a.Body))}
	if a.Header > 0 {
		h[tensor.InferenceHeader] = []string{strconv.Itoa(a.Header)}
	}
	if len(resp.Stages) > 0 {
		h["Server-Timing"] = []string{serverTiming(resp.Stages)}
		if c.batches {
			if timing := batchTiming(resp.Stages); timing != "" {
				h["Server-Timing"] = append(h["Server-Timing"], timing)
			}
		}
	}
	stamp(h, c)
	status := statusOf(resp.Header)
	if status == http.StatusNoContent || status == http.StatusNotModified {
		delete(h, "Content-Type")
		delete(h, "Content-Length")
		delete(h, tensor.InferenceHeader)
		a.Body = nil
	}
	w.WriteHeader(status)
	_, _ = w.Write(a.Body) // fails if the client is gone, or for HEAD
	return status
}

// answer makes the body of a response. inf says how an Open Inference Protocol answer is formed;
// nil: another kind of request.
func answer(inf *tensor.Inference, out tensor.Input) (a tensor.Answer, terr *task.Error) {
	var err error
	if inf == nil {
		a.ContentType, a.Body, err = tensor.ToHTTP(out)
	} else {
		a, err = inf.Answer(out)
	}
	if err == nil {
		return a, nil
	}
	if field := (*tensor.FieldError)(nil); errors.As(err, &field) {
		return a, &task.Error{Status: http.StatusBadRequest, Cause: err.Error()}
	}
	return a, &task.Error{Status: http.StatusInternalServerError, Cause: "output: " + err.Error()}
}

// statusOf returns the status that a function chose.
func statusOf(h []task.Header) int {
	if s := headerValue(h, task.HeaderStatus); s != "" {
		if n, err := strconv.Atoi(s); err == nil && n >= 200 && n <= 599 {
			return n
		}
	}
	return http.StatusOK
}

// fail writes an error and returns its status.
func fail(w http.ResponseWriter, c *call, e *task.Error) int {
	status := e.Status
	if status < 400 || status > 599 {
		status = http.StatusInternalServerError
	}
	h := w.Header()
	if e.Internal {
		h["X-Openfaas-Internal"] = []string{"stagecoach"}
	}
	if e.Dropped != "" {
		h[droppedHeader] = []string{string(e.Dropped)}
	}
	if status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable {
		seconds := max(1, (e.RetryAfter+time.Second-1)/time.Second) // rounded up
		h["Retry-After"] = []string{strconv.FormatInt(int64(seconds), 10)}
	}
	if status == http.StatusRequestTimeout {
		h["Connection"] = []string{"close"} // the client may still send the rest of its body
	}
	c.calls, c.cause = append(c.calls, e.Stages...), e.Error()
	text := hidden(c.hide, c.cause)
	stamp(h, c)
	if c.protocol {
		inferenceError(w, status, text)
		return status
	}
	text += "\n"
	h["Content-Type"] = []string{"text/plain; charset=utf-8"}
	h["Content-Length"] = []string{strconv.Itoa(len(text))}
	h["X-Content-Type-Options"] = []string{"nosniff"}
	w.WriteHeader(status)
	_, _ = w.Write([]byte(text)) // may fail as in succeed
	return status
}

// droppedHeader has the reason why a policy dropped a request.
const droppedHeader = "X-Dropped"

// hidden returns the part of an error text that clients may read.
func hidden(hide func(string) string, text string) string {
	if hide == nil {
		return text
	}
	return hide(text)
}

// stamp sets the headers that say when the request came and how long it took.
func stamp(h http.Header, c *call) {
	h["X-Call-Id"] = []string{c.id}
	h["X-Start-Time"] = []string{startTime(c)}
	h["X-Duration-Seconds"] = []string{seconds(time.Since(c.start))}
}

func startTime(c *call) string { return strconv.FormatInt(c.start.UnixNano(), 10) }

func seconds(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', 6, 64) }

// fromTheFunction reports whether a function's header goes to the client. Framing and the
// platform's headers do not.
func fromTheFunction(canonical string) bool {
	switch canonical {
	case "Connection", "Content-Length", "Content-Type", tensor.InferenceHeader, "Keep-Alive", "Proxy-Authenticate", "Proxy-Connection", "Retry-After",
		"Server-Timing", "Te", "Trailer", task.HeaderStatus, task.HeaderDirect, "Transfer-Encoding", "Upgrade", "X-Call-Id", droppedHeader, "X-Duration-Seconds",
		"X-Openfaas-Internal", "X-Start-Time":
		return false
	}
	return true
}

// maxTimings is the largest number of stages in a Server-Timing header.
const maxTimings = 32

// serverTiming returns the Server-Timing header of a request. Per stage, it has the time in
// milliseconds that the stage's calls waited and worked. If a stage had several calls, the times
// are sums, and the description is the number of calls. Stages are in the order in which their
// first calls ended.
func serverTiming(stages []task.Timing) string {
	type sum struct {
		stage         string
		wait, service time.Duration
		calls         int
	}
	var stack [8]sum
	sums := stack[:0]
next:
	for i := range stages {
		t := &stages[i]
		if t.Code != task.OK {
			continue
		}
		for i := range sums {
			if s := &sums[i]; s.stage == t.Stage {
				s.wait, s.service, s.calls = s.wait+t.Wait, s.service+t.Service, s.calls+1
				continue next
			}
		}
		if len(sums) < maxTimings {
			sums = append(sums, sum{t.Stage, t.Wait, t.Service, 1})
		}
	}
	b := make([]byte, 0, 64*len(sums)+64)
	metric := func(s *sum, what string, d time.Duration) {
		if len(b) > 0 {
			b = append(b, ", "...)
		}
		b = append(append(b, s.stage...), what...)
		b = strconv.AppendFloat(b, float64(d)/float64(time.Millisecond), 'f', 3, 64)
		if s.calls > 1 {
			b = append(strconv.AppendInt(append(b, `;desc="`...), int64(s.calls), 10), ` calls"`...)
		}
	}
	for i := range sums {
		metric(&sums[i], ".wait;dur=", sums[i].wait)
		metric(&sums[i], ".service;dur=", sums[i].service)
	}
	return string(b)
}

// batchTiming returns a second Server-Timing header, with one entry per call. An entry has the time
// in milliseconds that the call worked. Its description has the number and size of the call's
// batch, and the replica. Only a client that sends the holder of the function's pin as
// X-Batch-Timing gets this header.
func batchTiming(stages []task.Timing) string {
	var out []string
	for i := range stages {
		if t := &stages[i]; t.Code == task.OK && t.Batch > 0 && len(out) < maxTimings {
			out = append(out, fmt.Sprintf(`%s.batch;dur=%.3f;desc="%d of %d on %s"`, t.Stage, float64(t.Service)/float64(time.Millisecond), t.Batch, t.BatchSize, t.Replica))
		}
	}
	return strings.Join(out, ", ")
}
