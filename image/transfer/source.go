package transfer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
)

// Source is where an image may be: a process of the cluster, or a registry.
type Source struct {
	Name string // for logs and errors, such as: node "gpu-3"
	// Reach returns how the source is asked. A fetch calls it when it first needs the source.
	Reach func(ctx context.Context) (Endpoint, error)
}

// Endpoint is a repository of a source.
type Endpoint struct {
	Client *http.Client
	Base   string // URL of the repository, such as https://registry.example/v2/team/ocr
}

// ErrUnreachable means that no connection to a source comes about. A fetch does not ask that source
// again.
var ErrUnreachable = errors.New("it cannot be reached")

// Peer returns a process of the cluster that serves images with a [Server]. dial opens a connection
// to it. Its errors may wrap [ErrUnreachable].
func Peer(name string, dial func(ctx context.Context) (net.Conn, error)) Source {
	return Source{Name: name, Reach: func(context.Context) (Endpoint, error) {
		t := &http.Transport{
			DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
			DisableCompression: true, MaxIdleConnsPerHost: 2, IdleConnTimeout: idleTimeout / 2, ReadBufferSize: 64 << 10,
		}
		return Endpoint{&http.Client{Transport: t}, "http://peer/v2/image"}, nil
	}}
}

// Registry returns the registry in an image's name.
func Registry(r image.Registry, name string) Source {
	return Source{Name: "the registry of " + name, Reach: func(ctx context.Context) (Endpoint, error) {
		client, base, err := r.Client(ctx, name)
		return Endpoint{client, base}, err
	}}
}

// asked is a source as one fetch sees it.
type asked struct {
	Source

	endpoint Endpoint
	reached  bool
	gone     bool      // it is not asked again: it lacks the image, or has sent wrong bytes
	busy     time.Time // it is not asked before this time
	failed   int       // attempts in a row without a byte
	fault    error     // of the latest attempt
}

// patience is the number of attempts in a row that a source may fail.
const patience = 3

// again is the pause before a source is asked again after the first failure.
const again = 100 * time.Millisecond

// note records a failed attempt.
func (a *asked) note(err error) {
	a.fault = err
	if a.failed++; a.failed >= patience || errors.Is(err, image.ErrNoImage) || errors.Is(err, ErrUnreachable) {
		a.gone = true
		return
	}
	a.busy = time.Now().Add(again << (2 * (a.failed - 1)))
}

// errBusy means that a source sends as much as it may.
var errBusy = errors.New("it sends to as many others as it may")

// errSource is an answer that is not the wanted part.
type errSource struct{ text string }

func (e *errSource) Error() string { return e.text }

// get asks for something below the repository, from an offset on. It returns the body and its size
// from the start of the part; -1: unknown.
func (a *asked) get(ctx context.Context, path string, off int64) (io.ReadCloser, int64, error) {
	if !a.reached {
		e, err := a.Reach(ctx)
		if err != nil {
			return nil, 0, err
		}
		a.endpoint, a.reached = e, true
	}
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, a.endpoint.Base+path, nil)
	if err != nil {
		return nil, 0, err
	}
	q.Header.Set("Accept", "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json, */*")
	if off > 0 {
		q.Header.Set("Range", fmt.Sprintf("bytes=%d-", off))
	}
	resp, err := a.endpoint.Client.Do(q)
	if err != nil {
		return nil, 0, err
	}
	if err := accept(resp, off); err != nil {
		_ = resp.Body.Close()
		return nil, 0, err
	}
	if resp.ContentLength < 0 {
		return resp.Body, -1, nil
	}
	size := resp.ContentLength
	if resp.StatusCode == http.StatusPartialContent {
		size += off
	}
	return resp.Body, size, nil
}

// accept returns an error unless the body of an answer begins at the offset. It skips what a source
// without ranges sends before that.
func accept(resp *http.Response, off int64) error {
	switch resp.StatusCode {
	case http.StatusOK:
		if off > 0 {
			if _, err := io.CopyN(io.Discard, resp.Body, off); err != nil {
				return fmt.Errorf("it sends no range, and the first %d bytes did not come: %w", off, err)
			}
		}
		return nil
	case http.StatusPartialContent:
		if from := resp.Header.Get("Content-Range"); !strings.HasPrefix(from, fmt.Sprintf("bytes %d-", off)) {
			return &errSource{fmt.Sprintf("it answers with the range %.80q, want one from byte %d on", from, off)}
		}
		return nil
	case http.StatusServiceUnavailable, http.StatusTooManyRequests:
		return errBusy
	case http.StatusNotFound:
		return fmt.Errorf("%w: 404%s", image.ErrNoImage, said(resp.Body))
	case http.StatusUnauthorized, http.StatusForbidden:
		return fmt.Errorf("%w: status %d%s; log in, or name the file with credentials (--registry-config)", image.ErrNoImage, resp.StatusCode, said(resp.Body))
	}
	return &errSource{fmt.Sprintf("status %d%s", resp.StatusCode, said(resp.Body))}
}

// said returns the first error in the body of an answer, with a colon before it.
func said(body io.Reader) string {
	var all struct {
		Errors []struct{ Message string }
	}
	if err := json.NewDecoder(io.LimitReader(body, 64<<10)).Decode(&all); err != nil || len(all.Errors) == 0 {
		return ""
	}
	return fmt.Sprintf(": %.300s", all.Errors[0].Message)
}

// close closes the connections that a fetch has left open.
func (a *asked) close() {
	if a.reached {
		a.endpoint.Client.CloseIdleConnections()
	}
}

// folderPath returns the path of a folder of images, by its name without a digest.
func folderPath(name string) string {
	repository, tag, ok := strings.Cut(name, ":")
	if !ok {
		tag = "latest"
	}
	parts := strings.Split(repository, "/")
	for i, p := range parts {
		parts[i] = url.PathEscape(p)
	}
	return "/v2/" + strings.Join(parts, "/") + "/manifests/" + url.PathEscape(tag)
}
