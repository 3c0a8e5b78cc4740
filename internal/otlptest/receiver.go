// Package otlptest is a collector for tests. It is an HTTP server that takes traces in OTLP and
// keeps the spans.
package otlptest

import (
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	"google.golang.org/protobuf/proto"
)

// Span is one received span.
type Span struct {
	Trace, ID, Parent string // in hexadecimal; Parent is empty for a root
	Name, State       string // State is the tracestate
	Kind              string
	Start, End        time.Time
	Attributes        map[string]string // values as text
	Links             []string          // ids of spans
	Error             string            // the status' message, or "error"; empty: no error
	Resource          map[string]string
}

// Receiver keeps received spans.
type Receiver struct {
	URL string // of the collector

	mu     sync.Mutex
	spans  []Span
	refuse int
}

// Start runs a collector until the test ends.
func Start(t *testing.T) *Receiver {
	r := &Receiver{}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) { r.take(t, w, q) }))
	t.Cleanup(s.Close)
	r.URL = s.URL
	return r
}

// Refuse answers later requests with this status; 0: takes them again.
func (r *Receiver) Refuse(status int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refuse = status
}

// Spans returns the received spans in the order of their starts.
func (r *Receiver) Spans() []Span {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := slices.Clone(r.spans)
	slices.SortStableFunc(out, func(a, b Span) int { return a.Start.Compare(b.Start) })
	return out
}

func (r *Receiver) take(t *testing.T, w http.ResponseWriter, q *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refuse != 0 {
		w.WriteHeader(r.refuse)
		return
	}
	body, err := io.ReadAll(q.Body)
	if err != nil || q.URL.Path != "/v1/traces" || q.Header.Get("Content-Type") != "application/x-protobuf" {
		t.Errorf("%s %s of type %q, %v: want traces in protobuf", q.Method, q.URL, q.Header.Get("Content-Type"), err)
		return
	}
	var m collector.ExportTraceServiceRequest
	if err := proto.Unmarshal(body, &m); err != nil {
		t.Errorf("%d bytes: %v", len(body), err)
		return
	}
	for _, rs := range m.GetResourceSpans() {
		for _, ss := range rs.GetScopeSpans() {
			for _, s := range ss.GetSpans() {
				out := Span{
					Trace: hex.EncodeToString(s.GetTraceId()), ID: hex.EncodeToString(s.GetSpanId()), Parent: hex.EncodeToString(s.GetParentSpanId()),
					Name: s.GetName(), State: s.GetTraceState(), Kind: s.GetKind().String(), Attributes: texts(s.GetAttributes()),
					Start: time.Unix(0, int64(s.GetStartTimeUnixNano())), End: time.Unix(0, int64(s.GetEndTimeUnixNano())),
					Resource: texts(rs.GetResource().GetAttributes()),
				}
				if s.GetStatus().GetCode() == 2 {
					if out.Error = s.GetStatus().GetMessage(); out.Error == "" {
						out.Error = "error"
					}
				}
				for _, l := range s.GetLinks() {
					out.Links = append(out.Links, hex.EncodeToString(l.GetSpanId()))
				}
				r.spans = append(r.spans, out)
			}
		}
	}
	w.Header().Set("Content-Type", "application/x-protobuf")
}

func texts(list []*common.KeyValue) map[string]string {
	out := map[string]string{}
	for _, kv := range list {
		switch v := kv.GetValue().GetValue().(type) {
		case *common.AnyValue_StringValue:
			out[kv.GetKey()] = v.StringValue
		case *common.AnyValue_IntValue:
			out[kv.GetKey()] = strconv.FormatInt(v.IntValue, 10)
		default:
			out[kv.GetKey()] = kv.GetValue().String()
		}
	}
	return out
}
