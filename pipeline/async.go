package pipeline

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Async says how async requests for a function run. A pipeline uses that of its entry stage.
type Async struct {
	Concurrency int // concurrent runs
	QueueLimit  int // accepted requests that are not done
	Retry       Retry
	// A run that a policy dropped counts as a failed attempt and is repeated. Otherwise the request
	// becomes a dead letter.
	RetryDropped bool
}

// Retry says which runs of an async request are repeated, and when. Names and defaults are
// OpenFaaS's.
type Retry struct {
	Attempts int           // largest number of runs
	Codes    []int         // HTTP statuses that are retried; nil: DefaultRetryCodes
	MinWait  time.Duration // wait before the second run, doubled for each further one
	MaxWait  time.Duration // longest wait between two runs
}

// The defaults of [Async].
const (
	DefaultConcurrency     = 64
	DefaultAsyncQueueLimit = 10_000
	DefaultRetryAttempts   = 10
	DefaultRetryMinWait    = 10 * time.Second
	DefaultRetryMaxWait    = 2 * time.Minute
)

// DefaultRetryCodes returns OpenFaaS's codes and 503, which, like 429, means that the function
// cannot answer now.
func DefaultRetryCodes() []int { return []int{408, 429, 500, 502, 503, 504} }

// retryAnnotation is the prefix of OpenFaaS's annotations for retries.
const retryAnnotation = "com.openfaas.retry."

func defaultAsync() Async {
	return Async{
		Concurrency: DefaultConcurrency, QueueLimit: DefaultAsyncQueueLimit,
		Retry: Retry{DefaultRetryAttempts, nil, DefaultRetryMinWait, DefaultRetryMaxWait},
	}
}

// retries reads com.openfaas.retry.*. It ignores unknown annotations with that prefix.
func (p *parser) retries(r *Retry, annotations map[string]string) {
	path := func(name string) string { return fmt.Sprintf("annotations[%q]", retryAnnotation+name) }
	read := func(name string, f func(v string)) {
		if v, there := annotations[retryAnnotation+name]; there {
			p.path = path(name)
			f(v)
		}
	}
	// 0 means no retry, like 1.
	read("attempts", func(v string) { r.Attempts = max(1, p.number(v, DefaultRetryAttempts, 0, 100)) })
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

// codes reads a comma-separated list of HTTP error statuses. An empty list disables retries.
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
