package gateway

import (
	"crypto/rand"
	"fmt"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// request reads what the client sent. It does not set the deadline.
func (g *Gateway) request(w http.ResponseWriter, r *http.Request, c *call) (task.Request, time.Duration, *task.Error) {
	timeout, terr := g.timeout(c, r.Header.Get("X-Timeout"))
	if terr != nil {
		return task.Request{}, 0, terr
	}
	c.direct = g.speaksHTTP(c.key)
	if c.items, terr = itemsOf(r, c); terr != nil {
		return task.Request{}, 0, terr
	}
	header, terr := headerOf(r, c)
	if terr != nil {
		return task.Request{}, 0, terr
	}
	input, terr := g.input(w, r, c, c.start.Add(timeout))
	if terr != nil {
		return task.Request{}, 0, terr
	}
	if c.direct {
		header = append(header, task.Header{Name: task.HeaderDirect})
	}
	if holder := r.Header["X-Batch-Timing"]; holder != nil && g.cfg.Measures != nil {
		c.batches = g.cfg.Measures(c.key, holder[0])
	}
	req := task.Request{ID: c.id, Target: c.key.String(), Arrived: c.start, Header: header, Input: input}
	if r.Header["X-Call-Id"] != nil { // the client's id, which it may use for other requests too
		req.ID += "." + g.ids.next()
	}
	if t := r.Header.Get("Traceparent"); validTrace(t) {
		req.Traceparent = t
	}
	trace(&req, c.trace)
	return req, timeout, nil
}

// CallOf returns the X-Call-Id of the request with this id. If the client chose the X-Call-Id, the
// request's id is the X-Call-Id, a dot and a suffix.
func CallOf(request string) string { return strings.TrimSuffix(request, path.Ext(request)) }

// timeout parses X-Timeout: a Go duration or a number of seconds. The default is Config.Timeout
// plus the function's own limit, at most Config.MaxTimeout. So a request that has waited in line
// still has the function's whole limit to run.
func (g *Gateway) timeout(c *call, value string) (time.Duration, *task.Error) {
	if value == "" {
		own := time.Duration(0)
		if g.cfg.Exec != nil {
			own = g.cfg.Exec(c.key)
		}
		return min(g.cfg.Timeout+min(own, g.cfg.MaxTimeout), g.cfg.MaxTimeout), nil
	}
	d, err := time.ParseDuration(value)
	if n, e := strconv.ParseUint(value, 10, 31); e == nil {
		d, err = time.Duration(n)*time.Second, nil
	}
	if err != nil || d <= 0 || d > g.cfg.MaxTimeout {
		return 0, badHeader("X-Timeout", value, fmt.Sprintf("seconds or a duration such as 400ms, above 0 and up to %v", g.cfg.MaxTimeout))
	}
	return d, nil
}

// itemsOf reads X-Items. Functions that get bodies unchanged ignore it.
func itemsOf(r *http.Request, c *call) (string, *task.Error) {
	given := r.Header[itemsHeader]
	if given == nil || c.direct {
		return "", nil
	}
	if v := given[0]; len(given) == 1 && (v == pipeline.ItemsMany || v == pipeline.ItemsOne) {
		return v, nil
	}
	return "", badHeader(itemsHeader, strings.Join(given, ", "), "many or one: what a JSON array is, a list of items or one document")
}

// itemsHeader says whether a JSON array is a list of items or one document.
const itemsHeader = "X-Items"

func badHeader(name, got, want string) *task.Error {
	return &task.Error{Status: http.StatusBadRequest, Cause: fmt.Sprintf("header %s: got %.200q, want %s", name, got, want)}
}

// maxHeader is the largest request line plus headers in bytes that a function gets.
const maxHeader = 16 << 10

// headerOf returns the header fields that a function gets: the request line, the call's id, and the
// client's headers sorted by name.
func headerOf(r *http.Request, c *call) ([]task.Header, *task.Error) {
	out := make([]task.Header, 0, 7+len(r.Header))
	out = append(out, task.Header{Name: "Http-Method", Value: r.Method}, task.Header{Name: "Http-Path", Value: c.path})
	if r.URL.RawQuery != "" {
		out = append(out, task.Header{Name: "Http-Query", Value: r.URL.RawQuery})
	}
	from := origin(r)
	out = append(out, task.Header{Name: "X-Call-Id", Value: c.id}, task.Header{Name: "X-Forwarded-For", Value: from.client},
		task.Header{Name: "X-Forwarded-Host", Value: from.host}, task.Header{Name: "X-Forwarded-Proto", Value: from.proto})
	var stack [16]string
	names := stack[:0]
	for name := range r.Header {
		// A function that speaks HTTP reads its body itself, so it gets the headers about it.
		if forTheFunction(name) || c.direct && (name == itemsHeader || name == tensor.InferenceHeader) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		for _, value := range r.Header[name] {
			out = append(out, task.Header{Name: name, Value: value})
		}
	}
	size := 0
	for _, h := range out {
		size += len(h.Name) + len(h.Value)
	}
	if size > maxHeader {
		return nil, &task.Error{
			Status: http.StatusRequestHeaderFieldsTooLarge,
			Cause:  fmt.Sprintf("headers, path and query: %d bytes, want at most %d; send larger input in the body", size, maxHeader),
		}
	}
	return out, nil
}

// forTheFunction reports whether a client's header goes to the function. Hop-by-hop headers and the
// gateway's own do not.
func forTheFunction(canonical string) bool {
	switch canonical {
	case "Accept-Encoding", "Connection", "Content-Length", "Content-Type", "Expect", "Http-Method", "Http-Path", "Http-Query",
		tensor.InferenceHeader, "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "Te", "Traceparent", "Trailer",
		"Transfer-Encoding", "Upgrade", "X-Call-Id", "X-Callback-Url", itemsHeader, "X-Timeout", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto",
		task.HeaderDirect:
		return false
	}
	return true
}

// validTrace reports whether t is a W3C traceparent of version 00. The standard says to ignore all
// others.
func validTrace(t string) bool {
	return len(t) == 55 && t[2] == '-' && t[35] == '-' && t[52] == '-'
}

// validID reports whether a client's X-Call-Id is safe in logs, subjects and file names.
func validID(id string) bool {
	if id == "" || len(id) > 128 || !alphanumeric(id[0]) {
		return false
	}
	for i := range len(id) {
		if c := id[i]; !alphanumeric(c) && c != '-' && c != '.' && c != '_' {
			return false
		}
	}
	return true
}

func alphanumeric(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}

// ids makes unique ids: a random prefix per process, and a counter.
type ids struct {
	prefix string
	n      *atomic.Uint64
}

func newIDs() ids {
	return ids{strings.ToLower(rand.Text()[:16]) + "-", new(atomic.Uint64)}
}

func (i ids) next() string {
	var buf [32]byte
	return string(strconv.AppendUint(append(buf[:0], i.prefix...), i.n.Add(1), 36))
}
