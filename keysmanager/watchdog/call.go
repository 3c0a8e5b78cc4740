package watchdog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// call runs a call that carries its input. It sends the input to the function as a request and
// keeps the answer, up to maxOutput.
func call(c *stage.Call, function http.Handler, direct bool) stage.Result {
	r, err := request(c, direct)
	if err != nil {
		return stage.Result{Err: stage.BadInput(err)}
	}
	w := &recorder{header: http.Header{}}
	if err := serve(function, w, r); err != nil {
		return stage.Result{Err: err}
	}
	if err := c.Context().Err(); err != nil {
		return stage.Result{Err: err}
	}
	if w.status == 0 {
		w.status = http.StatusOK
	}
	contentType, body := w.header.Get("Content-Type"), w.body.Bytes()
	if direct {
		return stage.Result{
			Output: tensor.Activation{{ContentType: contentType, Bytes: body}},
			Header: append(headerOf(w.header), task.Header{Name: task.HeaderStatus, Value: strconv.Itoa(w.status)}),
		}
	}
	switch {
	case w.status >= 400 && w.status <= 499:
		return stage.Result{Err: stage.BadInput(refusal(w.status, body))}
	case w.status < 200 || w.status > 299:
		return stage.Result{Err: refusal(w.status, body)}
	}
	items, err := tensor.ItemsFromHTTP(contentType, body)
	if err != nil {
		return stage.Result{Err: fmt.Errorf("the function's answer: %w", err)}
	}
	return stage.Result{Output: items, Header: headerOf(w.header)}
}

// refusal turns an answer that is not an output into an error.
func refusal(status int, body []byte) error {
	const most = 500 // most bytes shown to a client
	text := bytes.TrimSpace(body[:min(len(body), most)])
	if len(text) == 0 {
		text = []byte(http.StatusText(status))
	}
	return fmt.Errorf("the function answered %d: %s", status, text)
}

// serve runs the handler. It returns an error if the handler breaks its answer off.
func serve(h http.Handler, w *recorder, r *http.Request) (err error) {
	defer func() {
		//nolint:errorlint // http.ErrAbortHandler is compared as the panic's value
		if p := recover(); p != nil && p != http.ErrAbortHandler {
			panic(p)
		} else if p != nil || w.full {
			err = errors.New("the function's answer broke off")
			if w.full {
				err = fmt.Errorf("the function's answer has more than %d bytes, want fewer in a pipeline or an async request", maxOutput)
			}
		}
	}()
	h.ServeHTTP(w, r)
	return nil
}

// request makes the HTTP request of a call.
func request(c *stage.Call, direct bool) (*http.Request, error) {
	contentType, body, err := tensor.ToHTTP(c.Input)
	if err != nil {
		return nil, err
	}
	method := c.HeaderValue("Http-Method")
	if method == "" || !direct && (method == http.MethodGet || method == http.MethodHead) && len(body) > 0 {
		// A stage's input is its body, whatever the method of the pipeline's request.
		method = http.MethodPost
	}
	target := c.HeaderValue("Http-Path")
	if target == "" {
		target = "/"
	}
	u, err := url.ParseRequestURI(target)
	if err != nil {
		return nil, fmt.Errorf("path: %w", err)
	}
	u.RawQuery = c.HeaderValue("Http-Query")
	r := (&http.Request{
		Method: method, URL: u, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{}, Host: c.HeaderValue("X-Forwarded-Host"),
		Body: io.NopCloser(bytes.NewReader(body)), ContentLength: int64(len(body)),
	}).WithContext(context.WithValue(c.Context(), callKey{}, c))
	for _, h := range c.Header {
		switch h.Name {
		case "Http-Method", "Http-Path", "Http-Query", task.HeaderDirect:
		default:
			r.Header[h.Name] = append(r.Header[h.Name], h.Value)
		}
	}
	if contentType != "" {
		r.Header.Set("Content-Type", contentType)
	}
	setTimeoutHeader(r, c)
	if c.Traceparent != "" {
		r.Header.Set("Traceparent", c.Traceparent)
	}
	return r, nil
}

func headerOf(h http.Header) (out []task.Header) {
	for name, values := range h {
		for _, v := range values {
			out = append(out, task.Header{Name: name, Value: v})
		}
	}
	return out
}

// recorder is the http.ResponseWriter of a call.
type recorder struct {
	header http.Header
	status int
	body   bytes.Buffer
	full   bool
}

// Header implements http.ResponseWriter.
func (w *recorder) Header() http.Header { return w.header }

// WriteHeader implements http.ResponseWriter. It drops informational answers.
func (w *recorder) WriteHeader(status int) {
	if w.status == 0 && status >= 200 {
		w.status = status
	}
}

// Write implements http.ResponseWriter.
func (w *recorder) Write(b []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	if w.body.Len()+len(b) > maxOutput {
		w.full = true
		return 0, io.ErrShortWrite
	}
	return w.body.Write(b)
}
