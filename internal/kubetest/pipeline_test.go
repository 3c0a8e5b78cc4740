package kubetest

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/functions/ocr/ocr"
	"github.com/stagecoach-serving/stagecoach/functions/ocr/page"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// ortPath is where an image has ONNX Runtime.
const ortPath = "/usr/lib/stagecoach/libonnxruntime.so.1"

// request sends a request to the gateway, and returns the answer with status 200.
func (i *installed) request(method, path string, body []byte) []byte {
	i.t.Helper()
	req, err := http.NewRequest(method, "http://"+i.gateway+path, bytes.NewReader(body))
	if err != nil {
		i.t.Fatal(err)
	}
	req.SetBasicAuth("admin", i.password)
	resp, err := i.http.Do(req)
	if err != nil {
		i.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode/100 != 2 {
		i.t.Fatalf("%s %s: status %d, %q, %v", method, path, resp.StatusCode, b, err)
	}
	return b
}

// ocr deploys the pipeline of stack.yml, and reads pages with it.
func (i *installed) ocr(t *testing.T) {
	t.Helper()
	stack, err := os.ReadFile("../../stack.yml")
	if err != nil {
		t.Fatal(err)
	}
	i.deploy(string(stack))
	for seed := range uint64(3) {
		p, err := page.Sample(seed+1, 0)
		if err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		got := i.request(http.MethodPost, "/function/ocr", p.PNG)
		cer := ocr.CER(string(got), p.Text())
		t.Logf("page %d: %d lines in %v, character error rate %.4f", seed+1, len(p.Lines), time.Since(begun).Round(time.Millisecond), cer)
		if cer > 0.05 {
			t.Errorf("page %d: character error rate %.4f, want at most 0.05:\n%s", seed+1, cer, got)
		}
	}
}

// timeline returns what has happened to a function's replicas.
func (i *installed) timeline(function string) (all schema.Timeline) {
	i.t.Helper()
	if err := json.Unmarshal(i.request(http.MethodGet, "/system/timeline/"+function, nil), &all); err != nil {
		i.t.Fatal(err)
	}
	return all
}

// least returns the smallest number of a function's ready replicas since begun, when n were ready.
// The leader must be the same since then.
func (i *installed) least(function string, n int, begun time.Time) int {
	i.t.Helper()
	ready, least := n, n
	for _, e := range i.timeline(function).Events {
		if e.At.Before(begun) {
			continue
		}
		switch e.Kind {
		case schema.Ready:
			ready++
		case "draining", "lost":
			ready--
			least = min(least, ready)
		}
	}
	return least
}

// scaleTo changes the number of a function's replicas, and waits until that many are ready. It
// returns how long that took from the first order to the last ready replica.
func (i *installed) scaleTo(function string, replicas int) time.Duration {
	i.t.Helper()
	begun := time.Now()
	i.request(http.MethodPost, "/system/scale-function/"+function, fmt.Appendf(nil, `{"serviceName": %q, "replicas": %d}`, function, replicas))
	var now schema.Timeline
	i.Await(fmt.Sprint(replicas, " replicas of ", function), func() (string, bool) {
		now = i.timeline(function)
		return fmt.Sprintf("%d ready: %s", now.Ready, now.Why), now.Ready == replicas
	})
	var first, last time.Time
	for _, e := range now.Events {
		if e.Kind == schema.Ordered && e.At.After(begun) && first.IsZero() {
			first = e.At
		}
		if e.Kind == schema.Ready && e.At.After(begun) {
			last = e.At
		}
	}
	return last.Sub(first)
}

// burst starts 20 replicas on three machines, scales to zero, and starts them again.
func (i *installed) burst(t *testing.T) {
	t.Helper()
	for _, what := range []string{"parameters are on the disks of no machine", "parameters are in the memory of all machines"} {
		t.Logf("0 to 20 replicas, %s: %v from the first order to the last ready replica", what, i.scaleTo("burst", 20).Round(time.Millisecond))
		i.scaleTo("burst", 0)
		begun := time.Now()
		i.request(http.MethodPost, "/function/burst", []byte("hello"))
		t.Logf("from zero: an answer after %v", time.Since(begun).Round(time.Millisecond))
		i.scaleTo("burst", 0)
	}
}
