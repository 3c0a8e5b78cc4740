package depot

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/image/transfer"
)

// Source returns the depot as a source of a [transfer.Fetcher], which checks all digests.
func (d *Depot) Source() transfer.Source {
	return transfer.Source{Name: "the object store of NATS", Reach: func(context.Context) (transfer.Endpoint, error) {
		return transfer.Endpoint{Client: &http.Client{Transport: registry{d}}, Base: "http://depot/v2/image"}, nil
	}}
}

// registry answers requests as a registry does, without a connection.
type registry struct{ *Depot }

// RoundTrip implements http.RoundTripper.
func (r registry) RoundTrip(q *http.Request) (*http.Response, error) {
	if q.Body != nil {
		_ = q.Body.Close() // a RoundTripper has to
	}
	at := strings.LastIndexByte(q.URL.Path, '/')
	digest := q.URL.Path[at+1:]
	var b []byte
	var err error
	from := int64(0)
	manifest := strings.HasSuffix(q.URL.Path[:at], "/manifests")
	if manifest {
		b, err = r.objects.Get(q.Context(), images+hexOf(digest))
	} else {
		if _, err := fmt.Sscanf(q.Header.Get("Range"), "bytes=%d-", &from); err != nil {
			from = 0 // all of it
		}
		b, err = r.objects.Get(q.Context(), pieceName(digest, from/piece))
	}
	switch {
	case errors.Is(err, ErrNone):
		return answer(q, http.StatusNotFound, io.NopCloser(bytes.NewReader(refusal(image.ErrNoImage)))), nil
	case err != nil:
		return nil, err
	case manifest:
		return answer(q, http.StatusOK, io.NopCloser(bytes.NewReader(b))), nil
	}
	p := &pieced{r.objects, q.Context(), digest, from / piece, b, len(b) < piece}
	p.b = p.b[min(from%piece, int64(len(b))):]
	if from == 0 {
		return answer(q, http.StatusOK, p), nil
	}
	out := answer(q, http.StatusPartialContent, p)
	out.Header.Set("Content-Range", fmt.Sprintf("bytes %d-", from))
	return out, nil
}

// answer returns an answer of unknown length.
func answer(q *http.Request, status int, body io.ReadCloser) *http.Response {
	return &http.Response{
		Status: http.StatusText(status), StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{}, Body: body, ContentLength: -1, Request: q,
	}
}

// refusal returns an error in the form of registries.
func refusal(err error) []byte {
	type fault struct {
		Message string `json:"message"`
	}
	b, _ := json.Marshal(map[string][]fault{"errors": {{err.Error()}}}) // has strings only
	return b
}

// pieced reads a part from its pieces, one after the other.
type pieced struct {
	objects Objects
	ctx     context.Context
	digest  string
	n       int64  // the piece that b belongs to
	b       []byte // not read yet
	last    bool   // no piece follows
}

// Read implements io.Reader.
func (p *pieced) Read(b []byte) (int, error) {
	for len(p.b) == 0 {
		if p.last {
			return 0, io.EOF
		}
		next, err := p.objects.Get(p.ctx, pieceName(p.digest, p.n+1))
		if errors.Is(err, ErrNone) { // also if a piece is missing: then the size is wrong
			p.last = true
			continue
		}
		if err != nil {
			return 0, err
		}
		p.n, p.b, p.last = p.n+1, next, len(next) < piece
	}
	n := copy(b, p.b)
	p.b = p.b[n:]
	return n, nil
}

// Close implements io.Closer.
func (p *pieced) Close() error { return nil }
