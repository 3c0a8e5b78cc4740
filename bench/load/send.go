package load

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"
)

// send sends one request and waits for its answer or callback.
func (r *run) send(ctx context.Context, t *Target, at time.Duration, body []byte, contentType string) outcome {
	ctx, cancel := context.WithDeadline(ctx, r.start.Add(at+t.Timeout))
	defer cancel()
	o := outcome{at: at}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, r.url(t), bytes.NewReader(body))
	if err != nil {
		o.sent, o.end, o.kind, o.example = at, at, "other", err.Error()
		return o
	}
	for name, values := range t.Header {
		req.Header[name] = values
	}
	if len(body) > 0 && req.Header.Get("Content-Type") == "" {
		req.Header.Set("Content-Type", contentType)
	}
	if u := r.cfg.Gateway.User; u != nil {
		password, _ := u.Password()
		req.SetBasicAuth(u.Username(), password)
	}
	var back <-chan callback
	if t.Async {
		id := ""
		id, back = r.callbacks.expect(t.Name)
		defer r.callbacks.forget(id)
		req.Header.Set("X-Call-Id", id)
		req.Header.Set("X-Callback-Url", r.callbacks.url)
	}
	o.sent = time.Since(r.start)
	r.mu.Lock()
	record(r.lag, o.sent-at)
	r.mu.Unlock()
	resp, err := r.client.Do(req)
	if err != nil {
		o.end = time.Since(r.start)
		o.kind, o.example = kindOf(err)
		return o
	}
	head, err := answer(resp)
	o.end = time.Since(r.start)
	switch {
	case err != nil:
		o.kind, o.example = kindOf(err)
	case resp.StatusCode < 200 || resp.StatusCode > 299:
		o.kind, o.example = fmt.Sprintf("status %d", resp.StatusCode), string(head)
	case t.Async:
		return r.called(ctx, o, back)
	default:
		o.stages = ServerTiming(strings.Join(resp.Header.Values("Server-Timing"), ", "))
	}
	return o
}

func (r *run) url(t *Target) string {
	path := "/function/"
	if t.Async {
		path = "/async-function/"
	}
	return strings.TrimSuffix((&url.URL{Scheme: r.cfg.Gateway.Scheme, Host: r.cfg.Gateway.Host, Path: r.cfg.Gateway.Path}).String(), "/") + path + t.Function
}

// answer reads a response to its end, so that the connection can be used again. It returns the
// first bytes.
func answer(resp *http.Response) ([]byte, error) {
	defer resp.Body.Close()
	head, err := io.ReadAll(io.LimitReader(resp.Body, maxExample))
	if err != nil {
		return nil, err
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return bytes.TrimSpace(head), err
}

// called waits for the callback of an accepted request.
func (r *run) called(ctx context.Context, o outcome, back <-chan callback) outcome {
	o.accepted = true
	select {
	case c := <-back:
		o.end = c.at.Sub(r.start)
		if c.status < 200 || c.status > 299 {
			o.kind, o.example = fmt.Sprintf("callback with status %d", c.status), c.head
		}
	case <-ctx.Done():
		o.end, o.lost = time.Since(r.start), true
		o.kind, o.example = "no callback", "accepted, and no callback came in time"
		if errors.Is(ctx.Err(), context.Canceled) {
			o.kind, o.example = KindInterrupted, "the run was ended while its callback was waited for"
		}
	}
	return o
}

// kindOf classifies an error of a request without an answer.
func kindOf(err error) (kind, example string) {
	if e := (*url.Error)(nil); errors.As(err, &e) {
		err = e.Err // without the URL
	}
	kind = "other"
	switch {
	case errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded):
		kind = "timeout"
	case errors.Is(err, context.Canceled):
		kind = KindInterrupted
	case errors.Is(err, syscall.ECONNREFUSED):
		kind = "refused"
	case errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF):
		kind = "reset"
	case isTimeout(err):
		kind = "timeout"
	}
	return kind, err.Error()
}

func isTimeout(err error) bool {
	var t interface{ Timeout() bool }
	return errors.As(err, &t) && t.Timeout()
}
