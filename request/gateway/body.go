package gateway

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Spool keeps large bodies outside memory; tensor.Dir implements it.
type Spool interface {
	// Stream stores all of r as one item. Its errors wrap those of r.
	Stream(owner, contentType string, r io.Reader) (tensor.Ref, error)
	// Drop deletes everything that owner has stored.
	Drop(owner string) error
}

// Sizes of bodies in bytes.
const (
	// smallBody separates small bodies from large ones. Memory for a small body is reserved before
	// the body arrives; a large body is spooled.
	smallBody = 1 << 20
	firstRoom = 4 << 10 // first buffer for a body of unknown length
)

// input reads the request's body, which must arrive by the deadline.
func (g *Gateway) input(w http.ResponseWriter, r *http.Request, c *call, deadline time.Time) (tensor.Activation, *task.Error) {
	if r.ContentLength > g.cfg.MaxBody {
		return nil, g.tooLarge()
	}
	contentType, binary := r.Header.Get("Content-Type"), r.Header.Get(tensor.InferenceHeader)
	in := &incoming{g: g, rc: http.NewResponseController(w), r: r.Body, deadline: deadline}
	var b []byte
	var err error
	if r.ContentLength != 0 {
		spools := c.spools && g.cfg.Spool != nil && binary == "" && !c.protocol && !tensor.Parsed(contentType)
		if !spools || r.ContentLength <= smallBody {
			b, err = g.collect(in, c, r.ContentLength, spools)
		}
		if spools && (r.ContentLength > smallBody || errors.Is(err, errLarge)) {
			return g.spool(in, c, contentType, b)
		}
	}
	if err != nil {
		return nil, asError(err)
	}
	input, err := g.items(c, contentType, binary, b)
	if err != nil {
		return nil, &task.Error{Status: http.StatusBadRequest, Cause: err.Error()}
	}
	return input, nil
}

// items parses a body. binary is the value of [tensor.InferenceHeader].
func (g *Gateway) items(c *call, contentType, binary string, b []byte) (input tensor.Activation, err error) {
	switch {
	case c.direct:
		return tensor.Document(contentType, b), nil
	case c.protocol:
		if input, c.inference, err = tensor.InferenceFromHTTP(binary, b); err == nil {
			c.inference.Model = c.name
		}
	case binary != "":
		input, c.inference, err = tensor.InferenceFromHTTP(binary, b)
	case c.items != pipeline.ItemsMany && tensor.IsArray(contentType, b) && (c.items == pipeline.ItemsOne || !g.cfg.Directory.TakesItems(c.key)):
		return tensor.Document(contentType, b), nil
	default:
		input, c.inference, err = tensor.FromHTTP(contentType, b)
	}
	return input, err
}

// errLarge means that the body does not fit in memory.
var errLarge = errors.New("the body is large")

// collect reads a body into memory. size is its declared length. If spools is set and the body
// turns out to be large, collect returns errLarge.
func (g *Gateway) collect(in *incoming, c *call, size int64, spools bool) ([]byte, error) {
	left := func(n int) int64 { // of the declared length
		if size < 0 {
			return max(int64(n), firstRoom)
		}
		return size - int64(n)
	}
	room := min(left(0), smallBody)
	if err := g.takeMemory(c, room); err != nil {
		return nil, err
	}
	b := make([]byte, 0, room)
	for {
		n, err := in.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		switch {
		case errors.Is(err, io.EOF):
			return b, nil
		case err != nil:
			return nil, err
		case len(b) < cap(b):
			continue
		case spools && len(b) >= smallBody:
			return b, errLarge
		}
		room = max(min(int64(len(b)), left(len(b))), 512)
		if err := g.takeMemory(c, room); err != nil {
			return nil, err
		}
		b = append(make([]byte, 0, int64(len(b))+room), b...)
	}
}

// spool stores a body. read is the part that has been read already.
func (g *Gateway) spool(in *incoming, c *call, contentType string, read []byte) (tensor.Activation, *task.Error) {
	c.spooled = "body-" + g.ids.next() // a client may use its call id twice
	body := &rest{head: read, r: in, done: func() { g.giveMemory(c) }}
	ref, err := g.cfg.Spool.Stream(c.spooled, contentType, body)
	if err != nil {
		return nil, asError(err)
	}
	return tensor.Activation{{Ref: &ref}}, nil
}

// rest reads a head, then the rest of the body.
type rest struct {
	head []byte
	r    io.Reader
	done func() // called when the head has been read
}

// Read implements io.Reader.
func (b *rest) Read(p []byte) (int, error) {
	if len(b.head) == 0 {
		return b.r.Read(p)
	}
	n := copy(p, b.head)
	if b.head = b.head[n:]; len(b.head) == 0 {
		b.head = nil
		b.done()
	}
	return n, nil
}

// takeMemory counts n bytes of a call's body until the call ends.
func (g *Gateway) takeMemory(c *call, n int64) error {
	if now := g.memory.Add(n); g.cfg.BodyMemory > 0 && now > g.cfg.BodyMemory {
		g.memory.Add(-n)
		return &task.Error{
			Status: http.StatusServiceUnavailable, Internal: true, RetryAfter: time.Second,
			Cause: fmt.Sprintf("request bodies take %d bytes of memory, of at most %d (requests.bodyMemory); try again later", now-n, g.cfg.BodyMemory),
		}
	}
	c.memory += n
	return nil
}

func (g *Gateway) giveMemory(c *call) {
	g.memory.Add(-c.memory)
	c.memory = 0
}

// forget releases the memory and the spooled data of a call's body.
func (g *Gateway) forget(c *call) {
	g.giveMemory(c)
	if c.spooled == "" {
		return
	}
	if err := g.cfg.Spool.Drop(c.spooled); err != nil {
		g.cfg.Log.Warn("failed to delete a spooled body; the next start deletes it", "call", c.id, "error", err)
	}
}

// incoming reads a body from the client and enforces its bounds. Its errors are *task.Error or
// io.EOF.
type incoming struct {
	g        *Gateway
	rc       *http.ResponseController
	r        io.Reader
	deadline time.Time
	n        int64 // bytes read
}

// Read implements io.Reader.
func (b *incoming) Read(p []byte) (int, error) {
	at, stall := b.deadline, b.g.cfg.Stall
	if stall > 0 {
		at = earlier(at, time.Now().Add(stall))
	}
	// net/http clears the deadline once the body is read. A test's recorder has no deadline.
	_ = b.rc.SetReadDeadline(at)
	n, err := b.r.Read(p)
	b.n += int64(n)
	switch {
	case b.n > b.g.cfg.MaxBody:
		return 0, b.g.tooLarge()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return n, &task.Error{Status: http.StatusRequestTimeout, Cause: fmt.Sprintf("body: %d bytes arrived in time; want the whole body by the deadline, and a piece of it every %v", b.n, stall)}
	case err != nil && !errors.Is(err, io.EOF):
		return n, &task.Error{Status: http.StatusBadRequest, Cause: fmt.Sprintf("body: after %d bytes: %v", b.n, err)}
	}
	return n, err
}

func earlier(a, b time.Time) time.Time {
	if b.Before(a) {
		return b
	}
	return a
}

func (g *Gateway) tooLarge() *task.Error {
	return &task.Error{Status: http.StatusRequestEntityTooLarge, Cause: fmt.Sprintf("body: want at most %d bytes", g.cfg.MaxBody)}
}

// asError returns the client's error for a body that could not be stored.
func asError(err error) *task.Error {
	var terr *task.Error
	switch {
	case errors.As(err, &terr):
		return terr
	case errors.Is(err, tensor.ErrFull):
		return &task.Error{Status: http.StatusServiceUnavailable, Internal: true, RetryAfter: time.Second, Cause: "body: " + err.Error()}
	}
	return &task.Error{Status: http.StatusInternalServerError, Internal: true, Cause: "body: " + err.Error()}
}
