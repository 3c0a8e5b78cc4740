package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// eightyTexts returns the body of a request with as many different items as perRequest.
func eightyTexts(client, number int) string {
	all := make([]string, perRequest)
	for i := range all {
		all[i] = fmt.Sprintf("%d-%d-%d", client, number, i)
	}
	body, _ := json.Marshal(all) // strings have a form in JSON
	return string(body)
}

// TestRequestsArePinnedPerVariant updates three functions of a stage in turn under requests with 80
// items each, which is more than the coordinator sends at a time. All items of a request that one
// function answers are from one version of it. No request fails, and no call runs twice.
func TestRequestsArePinnedPerVariant(t *testing.T) {
	t.Parallel()
	updates := fromEnvironment(t, "UPDATES", 6)
	l := startLanes(t, "read", "read-b", "read-c")
	fns := []fn{
		l.lane("read", map[string]string{"pipeline": "texts", "each": "true"}),
		l.lane("read-b", map[string]string{"variant-of": "read", "accuracy": "0.9"}),
		l.lane("read-c", map[string]string{"variant-of": "read", "accuracy": "0.8"}),
	}
	in := fn{"in", "noop", map[string]string{"min": "1", "max": "2"}, map[string]string{"pipeline": "texts", "next": "read", "route": "even"}, nil}
	l.deployAll(append(fns, in)...)
	l.hasTable("texts", "read", "any: read 0.33, read-b 0.33, read-c 0.33")
	load := l.loadOf(4, "/function/texts", eightyTexts, func(body string, a client.Answer) error {
		all, err := l.itemsBy(body, a.Status, a.Body)
		by := map[string]int{}
		for _, s := range all {
			by[s.function]++
		}
		if err == nil && len(by) < 2 {
			err = fmt.Errorf("%v answered all items, want several functions", by)
		}
		return err
	}, "Content-Type", "application/json")
	for u := range updates {
		load.turn()
		fns[u%3] = inVersion(fns[u%3], 2+u)
		l.deployAll(fns[u%3])
	}
	load.turn()
	requests, wrong := load.end()
	for _, w := range wrong {
		t.Errorf("%.1000s", w)
	}
	l.ranOnce()
	t.Logf("%d updates, %d requests of %d items", updates, requests, perRequest)
}

// dropped returns the counter of dropped requests.
func (l *laneRig) dropped() float64 {
	return l.value(`stagecoach_flow_dropped_total{reason="length"}`)
}

// TestDropsEndRequests sends inputs that no function of a stage takes. A dropped request is
// answered at once, with its reason; an async one is a dead letter, or runs again if its pipeline
// says so.
func TestDropsEndRequests(t *testing.T) {
	t.Parallel()
	l := startLanes(t, "read", "read-mid", "read-short")
	read, _, _ := l.texts()
	to := newReceiver(t)
	l.expect("/function/texts", sized("first ", 200), "read")
	before := l.dropped()
	long := sized("long ", 300)
	l.must(http.StatusAccepted, http.MethodPost, "/async-function/texts", long, "X-Call-Id", "mine", "X-Callback-Url", to.URL+"/?late")
	if c := to.next(t); c.status != "503" {
		t.Errorf("callback %+v, want one that says 503", c)
	}
	l.until(late, "a dead letter", func() bool { return len(l.letters()) == 1 })
	letter := l.letters()[0]
	if letter.Attempts != 1 || !strings.Contains(letter.Cause, "length 300, want at most 256") {
		t.Errorf("letter %+v, want one after one attempt, with both lengths", letter)
	}
	if shown := l.dead("show", letter.ID); !strings.Contains(shown, "dropped (length)") {
		t.Errorf("`dead show` has no reason:\n%s", shown)
	}
	if got := l.dropped(); got != before+1 {
		t.Errorf("%v requests dropped, want %v", got, before+1)
	}

	// An entry that asks for it gets another run, by which time a function takes the length.
	in := fn{"in", "noop", map[string]string{"min": "1", "max": "2"}, map[string]string{"pipeline": "texts", "next": "read", "length": "bytes", "retry-dropped": "true"}, nil}
	l.deployAll(in)
	l.must(http.StatusAccepted, http.MethodPost, "/async-function/texts", long, "X-Callback-Url", to.URL+"/?again")
	l.until(late, "a first, dropped run", func() bool { return l.dropped() >= before+2 })
	pids := l.pids("read", false)
	read.annotations["max-length"] = "1000"
	l.deployAll(read)
	if c := to.next(t); c.status != "200" || c.query != "again" {
		t.Errorf("callback %+v, want 200 from a later run", c)
	}
	if now := l.pids("read", false); fmt.Sprint(now) != fmt.Sprint(pids) {
		t.Errorf("replicas %v, want %v: a new max-length needs no restart", now, pids)
	}
	if n := len(l.letters()); n != 1 {
		t.Errorf("%d dead letters, want still one", n)
	}
}

// TestADropEndsAllItems sends a request with one item that no function takes, beside others whose
// calls are held. The request ends at once, and its other calls are canceled.
func TestADropEndsAllItems(t *testing.T) {
	t.Parallel()
	l := startLanes(t, "read", "read-b")
	read := l.lane("read", map[string]string{"pipeline": "texts", "each": "true", "max-length": "64", "length": "bytes"})
	l.deployAll(read, l.lane("read-b", map[string]string{"variant-of": "read", "max-length": "32"}))
	l.hasTable("texts", "read", "32: read-b 1; 64: read 1")
	l.file("read", "held", true)
	l.file("read-b", "held", true)
	body, _ := json.Marshal([]string{"a hold", sized("b ", 40) + "hold", "c hold", sized("too long ", 65)})
	a := l.send(http.MethodPost, "/function/texts", string(body), "Content-Type", "application/json")
	if a.Status != http.StatusServiceUnavailable || a.Header.Get("X-Dropped") != "length" || a.Header.Get("Retry-After") == "" {
		t.Errorf("status %d, %v, %s, want 503 with X-Dropped and Retry-After while the other calls are held", a.Status, a.Header, a.Body)
	}
	l.until(late, "no call to wait or run for the caller", func() bool {
		return l.line("read").Waiting == 0 && l.line("read-b").Waiting == 0
	})
	l.file("read", "held", false)
	l.file("read-b", "held", false)
	l.expect("/function/texts", "after", "read-b")

	// With a stage that is not idempotent, something may have begun that may not run twice.
	read.annotations["idempotent"] = "false"
	l.deployAll(read)
	l.until(late, "the new revision", func() bool { return l.line("read").Ready == 1 })
	l.file("read", "held", true)
	a = l.send(http.MethodPost, "/function/texts", string(body), "Content-Type", "application/json")
	l.file("read", "held", false)
	if a.Header.Get("X-Dropped") != "length" || a.Status != http.StatusBadGateway && a.Status != http.StatusServiceUnavailable {
		t.Errorf("status %d, %v, %s, want 502 or, before anything began, 503", a.Status, a.Header, a.Body)
	}
}
