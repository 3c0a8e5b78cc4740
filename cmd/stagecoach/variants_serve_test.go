package main

import (
	"fmt"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// texts is a pipeline whose second stage has three functions for different lengths in bytes.
func (l *laneRig) texts() (read, mid, short fn) {
	read = l.lane("read", map[string]string{"pipeline": "texts", "max-length": "256"})
	mid = l.lane("read-mid", map[string]string{"variant-of": "read", "max-length": "64"})
	short = l.lane("read-short", map[string]string{"variant-of": "read", "max-length": "16"})
	in := fn{"in", "noop", map[string]string{"min": "1", "max": "2"}, map[string]string{"pipeline": "texts", "next": "read", "length": "bytes"}, nil}
	l.deployAll(in, read, mid, short)
	l.hasTable("texts", "read", "16: read-short 1; 64: read-mid 1; 256: read 1")
	return read, mid, short
}

// sized returns a text of n bytes that begins with the given one.
func sized(text string, n int) string { return text + strings.Repeat("x", max(n-len(text), 0)) }

// expect checks that a request is answered by a function.
func (l *laneRig) expect(path, body, function string) {
	l.t.Helper()
	s, err := l.by(body, l.send(http.MethodPost, path, body))
	if err != nil || s.function != function {
		l.t.Fatalf("%d bytes to %s: answered by %q, %v, want %s", len(body), path, s.function, err, function)
	}
}

// TestVariantsServeTheirStage follows a stage with two variants through deploys and removals. The
// length of a request decides which function answers it. No change loses a request or runs a call
// twice.
func TestVariantsServeTheirStage(t *testing.T) {
	t.Parallel()
	l := startLanes(t, "read", "read-mid", "read-short")
	read, mid, short := l.texts()
	for _, tc := range []struct {
		bytes    int
		function string
	}{{1, "read-short"}, {16, "read-short"}, {17, "read-mid"}, {64, "read-mid"}, {65, "read"}, {256, "read"}} {
		l.expect("/function/texts", sized("length ", tc.bytes), tc.function)
	}
	a := l.send(http.MethodPost, "/function/texts", sized("long ", 257))
	if a.Status != http.StatusServiceUnavailable || a.Header.Get("X-Dropped") != "length" || a.Header.Get("Retry-After") == "" || !strings.Contains(string(a.Body), "length 257, want at most 256") {
		t.Errorf("257 bytes: status %d, %v, %s, want 503 with X-Dropped: length, Retry-After and both lengths", a.Status, a.Header, a.Body)
	}
	// No stage has measured a length for these, so each length is served.
	for _, name := range []string{"read", "read-mid", "read-short"} {
		l.expect("/function/"+name, sized("direct to "+name+" ", 300), name)
	}

	load := l.loadOf(6, "/function/texts", func(c, i int) string {
		return sized(fmt.Sprintf("%d-%d-", c, i), []int{16, 64, 256}[(c+i)%3])
	}, func(body string, a client.Answer) error {
		_, err := l.by(body, a)
		return err
	})
	load.turn()
	l.deployAll(inVersion(short, 2))
	l.until(late, "the second version of read-short", func() bool {
		s, err := l.by("a", l.send(http.MethodPost, "/function/texts", "a"))
		return err == nil && s.function == "read-short" && s.version == 2
	})
	load.turn()
	l.remove("read-mid")
	l.hasTable("texts", "read", "16: read-short 1; 256: read 1")
	l.expect("/function/texts", sized("without read-mid ", 64), "read")
	l.until(late, "the removed variant's replicas to end", func() bool { return len(l.pids("read-mid", false)) == 0 })
	load.turn()
	mid.annotations = map[string]string{"variant-of": "read", "max-length": "256", "accuracy": "0.9"}
	l.deployAll(mid)
	l.until(late, "read-mid", func() bool { return l.line("read-mid").Ready > 0 })
	load.turn()
	l.remove("read")
	l.hasTable("texts", "read", "16: read-short 1; 256: read-mid 1")
	l.expect("/function/texts", sized("without read ", 64), "read-mid")
	l.until(late, "the stage's own replicas to end", func() bool { return len(l.pids("read", false)) == 0 })
	load.turn()
	requests, wrong := load.end()
	for _, w := range wrong {
		t.Error(w)
	}
	if p := l.status("texts"); !p.Ready || len(p.Faults) > 0 || len(p.Stages) != 2 || !p.Stages[1].Retained {
		t.Errorf("the pipeline without the stage's own function: %+v, want it ready", p)
	}
	l.ranOnce()
	for _, f := range []fn{read, mid, short} {
		if f.name != "read" && f.name != "read-mid" { // the timelines of removed functions are gone
			if lost := l.events(f.name, schema.Lost); len(lost) > 0 {
				t.Errorf("%s lost replicas, want all drained: %+v", f.name, lost)
			}
		}
	}
	t.Logf("%d requests", requests)

	l.remove("read-short")
	l.expect("/function/texts", "short", "read-mid")
	l.remove("read-mid")
	l.until(late, "the pipeline's fault", func() bool { return !l.status("texts").Ready })
	if a := l.send(http.MethodPost, "/function/texts", "x"); a.Status/100 != 5 || !strings.Contains(string(a.Body), `"read", which is not deployed`) {
		t.Errorf("no function serves the stage: status %d, %s, want the fault", a.Status, a.Body)
	}
	l.deployAll(read)
	l.until(late, "the pipeline to be ready", func() bool { return l.status("texts").Ready })
	l.expect("/function/texts", "again", "read")
}

// TestVariantFaultsEndByThemselves deploys variants before their stage, and a variant of a variant.
// Status and `deploy --wait` tell what is wrong. This ends once the stage is there.
func TestVariantFaultsEndByThemselves(t *testing.T) {
	t.Parallel()
	l := startLanes(t, "read", "read-b", "read-c")
	b := l.lane("read-b", map[string]string{"variant-of": "read", "accuracy": "0.9"})
	l.deployAll(b)
	const missing = `"read", which is not deployed`
	if s := l.says("read-b"); !strings.Contains(s, "it serves no stage") || !strings.Contains(s, missing) {
		t.Errorf("status of a variant without its stage: %q, want %s", s, missing)
	}
	c := &operator{t, t.TempDir(), l.Base}
	c.write("stack.yml", `{version: 1.0, provider: {name: openfaas}, functions: {read-b: {image: "test/read-b:1", skip_build: true, environment: {lane_version: "1"}, annotations: {stagecoach.dev/variant-of: read}}}}`)
	c.refuse(missing, "", "deploy", "--wait")
	l.expect("/function/read-b", "alone", "read-b")

	l.deployAll(b, l.lane("read-c", map[string]string{"variant-of": "read-b"}), l.lane("read", map[string]string{"pipeline": "texts", "route": "even"}))
	const nested = `"read-b", which is a variant of "read"`
	if s := l.says("read-c"); !strings.Contains(s, nested) {
		t.Errorf("status of a variant of a variant: %q, want %s", s, nested)
	}
	want := []provider.PipelineFault{{Function: "read-c", Annotation: "stagecoach.dev/variant-of", Got: nested, Want: "a function that is no variant"}}
	if p := l.status("texts"); !p.Ready || !reflect.DeepEqual(p.Warnings, want) {
		t.Errorf("the pipeline's warnings: %+v, want %+v", p.Warnings, want)
	}
	if s := l.says("read-b"); strings.Contains(s, "serves no stage") {
		t.Errorf("status of read-b: %q, want none of its earlier fault", s)
	}
	l.hasTable("texts", "read", "any: read 0.5, read-b 0.5")
	l.deployAll(l.lane("read-c", map[string]string{"variant-of": "read"}))
	l.hasTable("texts", "read", "any: read 0.33, read-b 0.33, read-c 0.33")
	if p := l.status("texts"); len(p.Warnings) > 0 || len(p.Stages) != 1 || len(p.Stages[0].Variants) != 2 {
		t.Errorf("the pipeline: %+v, want two variants and no warnings", p)
	}
	answered := map[string]int{}
	for i := range 9 {
		body := fmt.Sprint("request ", i)
		s, err := l.by(body, l.send(http.MethodPost, "/function/texts", body))
		if err != nil {
			t.Error(err)
		}
		answered[s.function]++
	}
	if len(answered) != 3 {
		t.Errorf("answered by %v, want all three", answered)
	}
}

// TestVariantsChangeWithoutARestart changes what variants declare. The table follows, and all
// processes live on.
func TestVariantsChangeWithoutARestart(t *testing.T) {
	t.Parallel()
	l := startLanes(t, "read", "read-mid", "read-short")
	_, mid, short := l.texts()
	names := []string{"read", "read-mid", "read-short"}
	l.until(late, "a replica of each", func() bool {
		return !slices.ContainsFunc(names, func(name string) bool { return l.line(name).Ready == 0 })
	})
	before := l.descendants()
	load := l.loadOf(4, "/function/texts", func(c, i int) string {
		return sized(fmt.Sprintf("%d-%d-", c, i), []int{16, 64, 256}[(c+i)%3])
	}, func(body string, a client.Answer) error { _, err := l.by(body, a); return err })
	short.annotations = map[string]string{"variant-of": "read", "max-length": "32"}
	mid.annotations = map[string]string{"variant-of": "read", "max-length": "64", "accuracy": "0.8"}
	l.deployAll(short, mid)
	l.hasTable("texts", "read", "32: read-short 1; 64: read 1; 256: read 1")
	load.turn()
	_, wrong := load.end()
	for _, w := range wrong {
		t.Error(w)
	}
	l.expect("/function/texts", sized("", 32), "read-short")
	l.expect("/function/texts", sized("", 64), "read")
	after := l.descendants()
	for _, p := range before {
		if !slices.Contains(after, p) {
			t.Errorf("process %+v ended", p)
		}
	}
	for _, name := range names {
		for _, kind := range []string{schema.Stopped, schema.Lost, schema.Failed} {
			if e := l.events(name, kind); len(e) > 0 {
				t.Errorf("%s: %+v, want no replica to end", name, e)
			}
		}
	}
}
