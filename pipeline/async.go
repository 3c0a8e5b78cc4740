package pipeline

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Async is how async requests for a function are worked on; for a pipeline, what its entry stage says.
type Async struct {
	Concurrency int // runs at a time
	QueueLimit  int // requests that are accepted and not done
	Retry       Retry
}

// Retry says which runs of an async request are repeated, and when. Names and defaults are OpenFaaS's.
type Retry struct {
	Attempts int           // runs at most
	Codes    []int         // HTTP statuses of a result that are worth another run; nil: DefaultRetryCodes
	MinWait  time.Duration // before the second run, doubled for each further one
	MaxWait  time.Duration // between two runs at most
}

// The defaults of [Async].
const (
	DefaultConcurrency     = 64
	DefaultAsyncQueueLimit = 10_000
	DefaultRetryAttempts   = 10
	DefaultRetryMinWait    = 10 * time.Second
	DefaultRetryMaxWait    = 2 * time.Minute
)

// DefaultRetryCodes are OpenFaaS's and 503: of a function that cannot answer now, as 429 is.
func DefaultRetryCodes() []int { return []int{408, 429, 500, 502, 503, 504} }

// retryAnnotation starts the annotations of retries that OpenFaaS has.
const retryAnnotation = "com.openfaas.retry."

func defaultAsync() Async {
	return Async{DefaultConcurrency, DefaultAsyncQueueLimit, Retry{DefaultRetryAttempts, nil, DefaultRetryMinWait, DefaultRetryMaxWait}}
}

// retries reads com.openfaas.retry.*; those that do not exist are somebody else's and passed over.
func (p *parser) retries(r *Retry, annotations map[string]string) {
	path := func(name string) string { return fmt.Sprintf("annotations[%q]", retryAnnotation+name) }
	read := func(name string, f func(v string)) {
		if v, there := annotations[retryAnnotation+name]; there {
			p.path = path(name)
			f(v)
		}
	}
	read("attempts", func(v string) { r.Attempts = max(1, p.number(v, DefaultRetryAttempts, 0, 100)) }) // 0: never again, as 1
	read("codes", func(v string) { r.Codes = p.codes(v) })
	read("min_wait", func(v string) { r.MinWait = p.wait(v, DefaultRetryMinWait) })
	read("max_wait", func(v string) { r.MaxWait = p.wait(v, DefaultRetryMaxWait) })
	_, least := annotations[retryAnnotation+"min_wait"]
	_, most := annotations[retryAnnotation+"max_wait"]
	switch {
	case r.MinWait <= r.MaxWait:
	case least && most:
		p.fail(path("min_wait"), r.MinWait.String(), fmt.Sprintf("at most %smax_wait, which is %v", retryAnnotation, r.MaxWait))
	case least:
		r.MaxWait = r.MinWait
	default:
		r.MinWait = r.MaxWait
	}
}

// codes reads a comma-separated list of HTTP statuses that are errors; an empty one: none is worth another run.
func (p *parser) codes(v string) []int {
	out := []int{}
	if strings.TrimSpace(v) == "" {
		return out
	}
	for part := range strings.SplitSeq(v, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(part))
		if err != nil || n < 400 || n > 599 {
			p.fail(p.path, strconv.Quote(v), "HTTP statuses from 400 to 599 by commas, such as 429,502")
			return nil
		}
		out = append(out, n)
	}
	slices.Sort(out)
	return slices.Compact(out)
}
