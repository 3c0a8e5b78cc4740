package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"
)

// Callbacks delivers the results of async requests. Deliveries to one URL are at least once.
type Callbacks struct {
	client *http.Client
}

var errRefused = errors.New("refused by its receiver")

// The bounds of a callback's delivery: 5 attempts of up to 10 s, with pauses of 1, 2, 4 and 8 s.
const (
	callbackAttempts = 5
	callbackTimeout  = 10 * time.Second
	callbackPause    = time.Second
)

// NewCallbacks returns a deliverer with a client of its own. A nil transport means one that goes through no proxy.
func NewCallbacks(transport http.RoundTripper) *Callbacks {
	if transport == nil {
		transport = &http.Transport{
			MaxIdleConns: 100, MaxIdleConnsPerHost: 8, MaxConnsPerHost: 64, IdleConnTimeout: 30 * time.Second,
			TLSHandshakeTimeout: callbackTimeout,
		}
	}
	return &Callbacks{&http.Client{
		Transport: transport, Timeout: callbackTimeout,
		// A redirect would turn the POST into a GET, or lead where the client did not ask us to go.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// Close drops idle connections.
func (c *Callbacks) Close() { c.client.CloseIdleConnections() }

// Deliver posts r to url until somebody takes it with a status of 2xx, or refuses it with another below 500 (429 apart),
// or the attempts are used up.
func (c *Callbacks) Deliver(ctx context.Context, url string, r Result) error {
	for attempt := 1; ; attempt++ {
		err := c.post(ctx, url, r)
		if err == nil || attempt == callbackAttempts || errors.Is(err, errRefused) {
			return err
		}
		pause := time.NewTimer(callbackPause << (attempt - 1))
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
			return fmt.Errorf("callback after attempt %d: %w", attempt, errors.Join(ctx.Err(), err))
		}
	}
}

func (c *Callbacks) post(ctx context.Context, url string, r Result) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(r.Body))
	if err != nil {
		return fmt.Errorf("callback: %w", errors.Join(errRefused, err))
	}
	req.Header = http.Header{
		"Content-Type":       {r.ContentType},
		"X-Call-Id":          {r.CallID},
		"X-Function-Name":    {r.Name},
		"X-Function-Status":  {strconv.Itoa(r.Status)},
		"X-Duration-Seconds": {seconds(r.Duration)},
		"X-Start-Time":       {strconv.FormatInt(r.Start.UnixNano(), 10)},
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return fmt.Errorf("callback: %w", err)
	}
	defer func() { _ = resp.Body.Close() }()       // nothing is left to lose
	_, _ = io.CopyN(io.Discard, resp.Body, 64<<10) // so that the connection can be used again
	switch s := resp.StatusCode; {
	case s < 300:
		return nil
	case s < 500 && s != http.StatusTooManyRequests:
		return fmt.Errorf("callback to %s: status %d: %w", req.URL.Redacted(), s, errRefused)
	default:
		return fmt.Errorf("callback to %s: status %d, want 2xx", req.URL.Redacted(), s)
	}
}
