package main

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// TestLearnedDemand calls a pipeline, and reads what was learned, also after a restart, from the
// record of decisions, and after the stored records were damaged or written by a newer version.
func TestLearnedDemand(t *testing.T) {
	record := filepath.Join(t.TempDir(), "record.jsonl")
	r := start(t, "--record", record)
	r.deployAll(
		fn{"cut", "wait", nil, map[string]string{"pipeline": "film", "next": "grade"}, map[string]string{"wait_mean": "5ms", "wait_cv": "0"}},
		fn{"grade", "wait", nil, map[string]string{"pipeline": "film"}, map[string]string{"wait_mean": "20ms", "wait_cv": "0"}},
	)
	describe := func() (d schema.Demand) {
		t.Helper()
		var out bytes.Buffer
		if err := run(t.Context(), []string{"demand", "describe", "--gateway", r.Base, "--json", "film"}, &out); err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(out.Bytes(), &d); err != nil {
			t.Fatal(err)
		}
		return d
	}
	if d := describe(); len(d.Stages) != 0 || len(d.Notes) != 1 || !strings.Contains(d.Notes[0], "nothing is known") {
		t.Errorf("%+v, want a note that nothing is known", d)
	}
	const requests = 12
	for range requests {
		r.must(http.StatusOK, http.MethodPost, "/function/film", "x")
	}
	check := func(d schema.Demand) {
		t.Helper()
		if len(d.Notes) != 0 || len(d.Stages) != 2 || math.Abs(d.Requests-requests) > 1 {
			t.Fatalf("%+v, want two stages after %d requests", d, requests)
		}
		cut, grade := d.Stages[0], d.Stages[1]
		if len(cut.Next) != 1 || cut.Next[0].Stage != "grade" || cut.Next[0].Probability != 1 || cut.Next[0].Factor != 1 {
			t.Errorf("after cut: %+v, want grade, always, with one item per item", cut.Next)
		} else if v := cut.Next[0].Variants; len(v) != 1 || v[0].Function != "cut.openfaas-fn" || v[0].Factor != 1 || math.Abs(v[0].Calls-requests) > 1 || time.Since(v[0].Last) > time.Hour {
			t.Errorf("after cut: %+v, want the factor of its function, with its age", v)
		}
		if grade.PerRequest != 1 || len(grade.Lanes) != 1 || grade.Lanes[0].Function != "grade.openfaas-fn" || grade.Work.P50 < 0.0196 || grade.Work.Mean < 0.02 || len(grade.Work.Buckets) == 0 {
			t.Errorf("grade: %+v, want one call per request, of 20 ms or more", grade)
		}
	}
	check(describe())
	r.until(soon, "a decision with the learned demand", func() bool {
		b, err := os.ReadFile(record)
		return err == nil && bytes.Contains(b, []byte(`"Learned":{"Known":true`))
	})

	r.stop()
	r.restart()
	check(describe())
	var out bytes.Buffer
	if err := run(t.Context(), []string{"demand", "describe", "--gateway", r.Base, "film"}, &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"Application:  film.openfaas-fn", "STAGE", "grade.openfaas-fn", "PROBABILITY"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in\n%s", want, out.String())
		}
	}
	out.Reset()
	if err := run(t.Context(), []string{"demand", "describe", "--gateway", r.Base, "nobody"}, &out); err == nil || !strings.Contains(err.Error(), `"nobody"`) {
		t.Errorf("an application that does not exist: %v, want an error with its name", err)
	}
	r.stop()
	out.Reset()
	if err := run(t.Context(), []string{"replay", record}, &out); err != nil || !strings.Contains(out.String(), " decisions made again: each as it was") {
		t.Errorf("replay: %v\n%s", err, out.String())
	}

	for _, tc := range []struct {
		change func([]byte)
		want   string
	}{
		{func(b []byte) { b[len("sc-demand")]++ }, "a newer Stagecoach has written it"},
		{func(b []byte) { b[len(b)-1]++ }, "it is damaged"},
	} {
		changeRecords(t, r.state, tc.change)
		r.restart()
		if d := describe(); len(d.Stages) != 0 || !slices.ContainsFunc(d.Notes, func(n string) bool { return strings.Contains(n, tc.want) }) {
			t.Errorf("%+v, want it empty, and a note with %q", d, tc.want)
		}
		if !strings.Contains(r.log.String(), "learned demand cannot be read") || !strings.Contains(r.log.String(), tc.want) {
			t.Errorf("the log does not say %q", tc.want)
		}
		for range requests {
			r.must(http.StatusOK, http.MethodPost, "/function/film", "x")
		}
		if d := describe(); len(d.Stages) != 2 {
			t.Errorf("%+v, want it to be learned again", d)
		}
		r.stop()
		r.restart()
		check(describe())
		r.stop()
	}
	r.restart() // for the cleanup
}

// changeRecords changes all records of learned demand in a state folder that no process uses.
func changeRecords(t *testing.T, state string, change func([]byte)) {
	t.Helper()
	server, err := queue.StartServer(queue.ServerConfig{Dir: filepath.Join(state, "nats"), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	nc, err := server.Connect("test")
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	kv, err := queue.OpenKV(ctx, nc, server.Disk(), demandBucket)
	if err != nil {
		t.Fatal(err)
	}
	var all []queue.Entry
	stop, err := kv.Watch(ctx, func(e queue.Entry) { all = append(all, e) })
	if err != nil {
		t.Fatal(err)
	}
	stop()
	if len(all) != 1 {
		t.Errorf("%d records, want one", len(all))
	}
	for _, e := range all {
		change(e.Value)
		if _, err := kv.Put(ctx, e.Key, e.Value); err != nil {
			t.Fatal(err)
		}
	}
}
