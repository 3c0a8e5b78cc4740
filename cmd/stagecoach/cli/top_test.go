package cli

import (
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stagecoach-serving/stagecoach/internal/golden"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// busyView is a cluster in which much is going on.
func busyView() schema.Top {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	from, to := 1, 5
	v := schema.Top{
		At: at,
		Pipelines: []schema.TopPipeline{
			{Name: "ocr.openfaas-fn", Rate: 12.34, P50: 0.2071, P99: 0.87, SLO: 2, Within: 0.993, Failed: 0.004, InFlight: 4},
			{Name: "translate.team-a", Fault: `function "draft", stagecoach.dev/next: got "check", which is not deployed`},
		},
		Functions: []schema.TopFunction{
			{Name: "a-name-that-is-much-longer-than-a-column.openfaas-fn", Rate: 1234, CV: 1.5, Waiting: 1000, Running: 64, Wait: 12.5, Service: 0.000021, Utilisation: 1.07, Ready: 12, Starting: 4, Wanted: 20, Why: "λ=1234/s μ=5.1/s wait≤195ms: 20 by Erlang C"},
			{Name: "broken.openfaas-fn", Why: "3 starts failed: \x1b[31mexit status 1:\nno such file"},
			{Name: "ocr-detect.openfaas-fn", Rate: 12.3, CV: 0.9, Running: 2, Wait: 0.0079, Service: 0.0987, Utilisation: 0.61, Ready: 2, Wanted: 2, Why: "as it was"},
		},
		Nodes: []schema.TopNode{{Name: "node-1", Memory: 24 << 30, MemoryUsed: 900 << 20, Zygotes: 3, Replicas: 14}},
	}
	for i := range 25 {
		v.Functions = append(v.Functions, schema.TopFunction{Name: fmt.Sprintf("sleeps-%02d.openfaas-fn", i)})
		v.Events = append(v.Events, schema.TopEvent{At: at.Add(time.Duration(i-25) * time.Second), Kind: "replica.ready", Replica: fmt.Sprintf("ocr-detect-%02d", i), Path: "fork"})
	}
	v.Events = append(
		v.Events, schema.TopEvent{At: at, Kind: "function.scaled", Function: pipeline.ParseKey("ocr-detect.openfaas-fn"), From: &from, To: &to, Why: "λ=17.4/s μ=4.4/s wait≤228ms: 5 by Erlang C, +1 to drain"},
		schema.TopEvent{At: at, Kind: "replica.lost", Replica: "ocr-detect-03", Why: "killed by SIGKILL"})
	return v
}

// TestTopLooks compares what is drawn with golden files. If it fails, look at the difference, and
// run with -rewrite if you can say why each line has changed.
func TestTopLooks(t *testing.T) {
	for _, size := range [][2]int{{80, 24}, {120, 40}} {
		golden.Compare(t, fmt.Sprintf("top-%dx%d.txt", size[0], size[1]), strings.Join(renderTop(busyView(), size[0], size[1]), "\n")+"\n")
	}
}

// TestTopShowsVariantsBelowTheirStage checks that a stage and its variants stay together, before
// idle functions if one of them is busy.
func TestTopShowsVariantsBelowTheirStage(t *testing.T) {
	const ns = ".openfaas-fn"
	s := topFunctions([]schema.TopFunction{
		{Name: "asleep" + ns},
		{Name: "lost" + ns, VariantOf: "gone" + ns, Ready: 1},
		{Name: "read" + ns},
		{Name: "fast" + ns, VariantOf: "read" + ns, Rate: 1},
		{Name: "slow" + ns, VariantOf: "read" + ns},
		{Name: "warm" + ns, Ready: 1},
	})
	var got []string
	for _, row := range s.rows {
		got = append(got, row[0])
	}
	if want := "lost|read|  fast|  slow|warm|asleep"; strings.Join(got, "|") != want {
		t.Errorf("got  %s\nwant %s", strings.Join(got, "|"), want)
	}
}

// TestTopFits draws on terminals of all sizes: nothing is wider or higher, and all characters are
// printable.
func TestTopFits(t *testing.T) {
	for _, v := range []schema.Top{busyView(), {}} {
		for width := range 200 {
			for _, height := range []int{1, 2, 9, 10, 24, 60} {
				lines := renderTop(v, width, height)
				if len(lines) > height {
					t.Fatalf("%d lines on %d×%d", len(lines), width, height)
				}
				for _, l := range lines {
					if utf8.RuneCountInString(l) > width && width > 0 || strings.ContainsFunc(l, func(r rune) bool { return r < ' ' }) {
						t.Fatalf("%q on %d×%d", l, width, height)
					}
				}
			}
		}
	}
}
