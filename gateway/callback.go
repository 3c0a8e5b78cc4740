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

	"github.com/stagecoach-serving/stagecoach/task"
)

// Result is the end of an async request, as its callback gets it.
type Result struct {
	CallID      string        `json:"callId"`
	Name        string        `json:"name"`   // of the function, as the client wrote it
	Status      int           `json:"status"` // HTTP status
	ContentType string        `json:"contentType,omitempty"`
	Body        []byte        `json:"-"`
	Start       time.Time     `json:"start"`    // when the request was accepted
	Duration    time.Duration `json:"duration"` // of its last run
	Attempt     int           `json:"attempt"`  // number of its last run
}

func (r *Result) fail(e *task.Error) {
	r.Status, r.ContentType, r.Body = e.Status, "text/plain; charset=utf-8", []byte(e.Error()+"\n")
}

// Notice is a result that is to be told.
type Notice struct {
	URL    string `json:"url"`
	Inside bool   `json:"inside,omitempty"` // as [Entry] has it
	Result
}

// Where is a callback's URL without what may be a secret: user, password and query. It is for logs and operators.
func Where(callback string) string {
	u, err := url.Parse(callback)
	if err != nil {
		return ""
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}

// Host is who the notice goes to.
func (n *Notice) Host() string {
	u, err := url.Parse(n.URL)
	if err != nil {
		return ""
	}
	return u.Host
}

// noticeVersion is the version of a notice's binary form.
const noticeVersion = 1

// MarshalBinary gives the form in which a journal keeps n: the version, the length of the head (uvarint), the head as JSON,
// the body.
func (n Notice) MarshalBinary() ([]byte, error) {
	head, err := json.Marshal(n)
	if err != nil {
		return nil, fmt.Errorf("result of call %q: %w", n.CallID, err)
	}
	return append(append(binary.AppendUvarint([]byte{noticeVersion}, uint64(len(head))), head...), n.Body...), nil
}

// UnmarshalBinary undoes [Notice.MarshalBinary]. The notice keeps parts of b.
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

// splitHead takes a version, a length and a head of that length off b.
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

// ErrRefused says that a callback is not tried again. A transport's dial may wrap it.
var ErrRefused = errors.New("refused by its receiver")

// callbackTimeout bounds one attempt to deliver.
const callbackTimeout = 10 * time.Second

// callbackRetry is how a result is delivered: 10 attempts over about ten minutes.
func callbackRetry() Retry {
	return Retry{Attempts: 10, MinWait: time.Second, MaxWait: 5 * time.Minute}
}

// CallbackTransport returns a transport for callbacks, which goes through no proxy. A nil dial is net.Dialer's.
func CallbackTransport(dial func(ctx context.Context, network, address string) (net.Conn, error)) *http.Transport {
	return &http.Transport{
		DialContext: dial, MaxIdleConns: 100, MaxIdleConnsPerHost: 8, MaxConnsPerHost: 64, IdleConnTimeout: 30 * time.Second,
		TLSHandshakeTimeout: callbackTimeout, ForceAttemptHTTP2: true, // which a dial of one's own turns off
	}
}

// NewCallbacks returns a deliverer with clients of its own. Results of requests that functions have sent go out by the
// transport inside, which must not reach more than functions do; all others go out by transport.
func NewCallbacks(transport, inside http.RoundTripper) *Callbacks {
	return &Callbacks{callbackClient(transport), callbackClient(inside)}
}

func callbackClient(transport http.RoundTripper) *http.Client {
	return &http.Client{
		Timeout: callbackTimeout, Transport: transport,
		// A redirect would turn the POST into a GET, or lead where the client did not ask us to go.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// Close drops idle connections.
func (c *Callbacks) Close() {
	c.client.CloseIdleConnections()
	c.inside.CloseIdleConnections()
}

// Tell posts n to its URL. It adds X-Redelivered: true unless this is certainly the first time.
// With a status of 2xx, the receiver has accepted n. With any other status below 500 except 429, it
// never will. If ctx has ended, the attempt was cut short and does not count.
func (c *Callbacks) Tell(ctx context.Context, n Notice, try Try) Ending {
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
		return fmt.Errorf("callback to %s: no URL to post to: %w", Where(n.URL), ErrRefused)
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
		if errors.As(err, &u) { // which has the URL with its query
			err = u.Err
		}
		return fmt.Errorf("callback to %s: %w", Where(n.URL), err)
	}
	defer func() { _ = resp.Body.Close() }()       // nothing is left to lose
	_, _ = io.CopyN(io.Discard, resp.Body, 64<<10) // so that the connection can be used again
	switch s := resp.StatusCode; {
	case s < 300:
		return nil
	case s < 500 && s != http.StatusTooManyRequests:
		return fmt.Errorf("callback to %s: status %d: %w", Where(n.URL), s, ErrRefused)
	default:
		return fmt.Errorf("callback to %s: status %d, want 2xx", Where(n.URL), s)
	}
}
