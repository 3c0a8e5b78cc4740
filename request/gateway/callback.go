package gateway

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// Result is the outcome of an async request, as its callback gets it.
type Result struct {
	CallID      string        `json:"callId"`
	Name        string        `json:"name"`   // function's name, as the client wrote it
	Status      int           `json:"status"` // HTTP status
	ContentType string        `json:"contentType,omitempty"`
	Body        []byte        `json:"-"`
	Start       time.Time     `json:"start"`    // when the gateway accepted the request
	Duration    time.Duration `json:"duration"` // of the last run
	Attempt     int           `json:"attempt"`  // number of the last run
	// Why a policy dropped the last run; empty: no policy did.
	Dropped task.DropReason `json:"dropped,omitempty"`
}

func (r *Result) fail(e *task.Error) {
	r.Status, r.ContentType, r.Body = e.Status, "text/plain; charset=utf-8", []byte(e.Error()+"\n")
	r.Dropped = e.Dropped
}

// Notice is a result that has to be delivered to a callback.
type Notice struct {
	URL    string `json:"url"`
	Inside bool   `json:"inside,omitempty"` // see [Entry]
	Result
}

// SafeURL returns a callback's URL for logs and operators. It leaves out the parts that may be
// secret: user, password and query.
func SafeURL(callback string) string {
	u, err := url.Parse(callback)
	if err != nil {
		return ""
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}

// Host returns the host that receives the notice.
func (n *Notice) Host() string {
	u, err := url.Parse(n.URL)
	if err != nil {
		return ""
	}
	return u.Host
}

// noticeVersion is the version of a notice's binary form.
const noticeVersion = 1

// MarshalBinary returns the form in which a journal stores n: the version, the length of the head
// (uvarint), the head as JSON, and the body.
func (n Notice) MarshalBinary() ([]byte, error) {
	head, err := json.Marshal(n)
	if err != nil {
		return nil, fmt.Errorf("result of call %q: %w", n.CallID, err)
	}
	return append(append(binary.AppendUvarint([]byte{noticeVersion}, uint64(len(head))), head...), n.Body...), nil
}

// UnmarshalBinary decodes what [Notice.MarshalBinary] wrote. The notice keeps references to b.
func (n *Notice) UnmarshalBinary(b []byte) error {
	head, body, err := splitHead(b, noticeVersion)
	if err != nil {
		return fmt.Errorf("result of an async request: %w", err)
	}
	*n = Notice{}
	if err := json.Unmarshal(head, n); err != nil {
		return fmt.Errorf("result of an async request: head: %w", err)
	}
	n.Body = body
	return nil
}

// splitHead splits b, after a version byte and a length, into a head of that length and the rest.
func splitHead(b []byte, version byte) (head, rest []byte, err error) {
	if len(b) == 0 || b[0] != version {
		return nil, nil, fmt.Errorf("%d bytes, want version %d first", len(b), version)
	}
	n, k := binary.Uvarint(b[1:])
	b = b[1+max(k, 0):]
	if k <= 0 || n > uint64(len(b)) {
		return nil, nil, fmt.Errorf("head of %d bytes, %d are there", n, len(b))
	}
	return b[:n], b[n:], nil
}

// Callbacks delivers the results of async requests, at least once each.
type Callbacks struct {
	client, inside *http.Client
}

// ErrRefused means that a callback must not be tried again. A transport's dial function may wrap
// it.
var ErrRefused = errors.New("refused by its receiver")

// callbackTimeout bounds one attempt to deliver.
const callbackTimeout = 10 * time.Second

// callbackRetry returns the retry policy of callbacks: 10 attempts over about ten minutes.
func callbackRetry() Retry {
	return Retry{Attempts: 10, MinWait: time.Second, MaxWait: 5 * time.Minute}
}

// CallbackTransport returns a transport for callbacks that uses no proxy. If dial is nil, it uses
// net.Dialer.
func CallbackTransport(dial func(ctx context.Context, network, address string) (net.Conn, error)) *http.Transport {
	return &http.Transport{
		DialContext: dial, MaxIdleConns: 100, MaxIdleConnsPerHost: 8, MaxConnsPerHost: 64, IdleConnTimeout: 30 * time.Second,
		// ForceAttemptHTTP2 because a custom dial function turns HTTP/2 off.
		TLSHandshakeTimeout: callbackTimeout, ForceAttemptHTTP2: true,
	}
}

// NewCallbacks returns Callbacks that send over two transports. The transport inside is for the
// results of requests that came from functions, so it must reach only addresses that functions can
// reach. The other transport is for all other results.
func NewCallbacks(transport, inside http.RoundTripper) *Callbacks {
	return &Callbacks{callbackClient(transport), callbackClient(inside)}
}

func callbackClient(transport http.RoundTripper) *http.Client {
	return &http.Client{
		Timeout: callbackTimeout, Transport: transport,
		// A redirect would turn the POST into a GET, or lead to a place that the client did not
		// name.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Close closes idle connections.
func (c *Callbacks) Close() {
	c.client.CloseIdleConnections()
	c.inside.CloseIdleConnections()
}

// Deliver posts n to its URL. It adds X-Redelivered: true unless this is certainly the first
// attempt. A 2xx status means that the receiver accepted n. After status 429, a status of 500 or
// above, or a failed connection, Deliver may be called again. Any other status is final. If ctx
// ends first, the attempt was cut short and does not count.
func (c *Callbacks) Deliver(ctx context.Context, n Notice, try Try) Ending {
	attempt := try.Attempt
	err := c.post(ctx, n, try.Redelivered || attempt > 1)
	if err == nil || ctx.Err() != nil {
		return Ending{Err: err}
	}
	retry := callbackRetry()
	end := Ending{Err: fmt.Errorf("attempt %d of %d: %w", attempt, retry.Attempts, err)}
	if attempt < retry.Attempts && !errors.Is(err, ErrRefused) {
		end.Again, end.After = true, retry.wait(attempt, 0)
	}
	return end
}

func (c *Callbacks) post(ctx context.Context, n Notice, redelivered bool) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, n.URL, bytes.NewReader(n.Body))
	if err != nil {
		return fmt.Errorf("callback to %s: no URL to post to: %w", SafeURL(n.URL), ErrRefused)
	}
	req.Header = http.Header{
		"Content-Type":       {n.ContentType},
		"X-Call-Id":          {n.CallID},
		"X-Function-Name":    {n.Name},
		"X-Function-Status":  {strconv.Itoa(n.Status)},
		"X-Duration-Seconds": {seconds(n.Duration)},
		"X-Start-Time":       {strconv.FormatInt(n.Start.UnixNano(), 10)},
		attemptHeader:        {strconv.Itoa(n.Attempt)},
	}
	if n.Dropped != "" {
		req.Header[droppedHeader] = []string{string(n.Dropped)}
	}
	if redelivered {
		req.Header[redeliveredHeader] = []string{"true"}
	}
	client := c.client
	if n.Inside {
		client = c.inside
	}
	resp, err := client.Do(req)
	if err != nil {
		var u *url.Error
		if errors.As(err, &u) { // its text contains the URL with its query
			err = u.Err
		}
		return fmt.Errorf("callback to %s: %w", SafeURL(n.URL), err)
	}
	defer func() { _ = resp.Body.Close() }()       // the result does not depend on it
	_, _ = io.CopyN(io.Discard, resp.Body, 64<<10) // lets the connection be used again
	switch s := resp.StatusCode; {
	case s < 300:
		return nil
	case s < 500 && s != http.StatusTooManyRequests:
		return fmt.Errorf("callback to %s: status %d: %w", SafeURL(n.URL), s, ErrRefused)
	default:
		return fmt.Errorf("callback to %s: status %d, want 2xx", SafeURL(n.URL), s)
	}
}
