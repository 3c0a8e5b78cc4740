package main

import (
	"bytes"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
)

func TestDrawHasTheMeanAndVariationAskedFor(t *testing.T) {
	for _, cv := range []float64{0, 0.5, 2} {
		r := rand.New(rand.NewPCG(1, 2))
		const n = 200_000
		sum, squares := 0.0, 0.0
		for range n {
			v := draw(r, time.Second, cv).Seconds()
			sum += v
			squares += v * v
		}
		mean := sum / n
		got := math.Sqrt(squares/n-mean*mean) / mean
		if math.Abs(mean-1) > 0.03 || math.Abs(got-cv) > 0.05*max(1, cv) {
			t.Errorf("cv %g: mean %.3f s and cv %.3f, want 1 s and %g", cv, mean, got, cv)
		}
	}
}

func TestParseNamesTheVariable(t *testing.T) {
	for k, v := range map[string]string{"wait_mean": "2h", "wait_cv": "-1", "wait_seed": "x", "wait_batch_cost": "11", "wait_items": "1,,2"} {
		if _, err := parse(func(name string) string { return map[string]string{k: v}[name] }); err == nil {
			t.Errorf("%s=%q: no error", k, v)
		}
	}
	s, err := parse(func(string) string { return "" })
	if err != nil || s.mean != 200*time.Millisecond || s.cv != 0.5 || s.cost != 1 || !slices.Equal(s.items, []int{1}) {
		t.Errorf("defaults: %+v, %v", s, err)
	}
	env := map[string]string{"wait_batch_cost": "0.25", "wait_items": "0, 2,4"}
	if s, err = parse(func(name string) string { return env[name] }); err != nil || s.cost != 0.25 || !slices.Equal(s.items, []int{0, 2, 4}) {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestSmallestInputIsBounded(t *testing.T) {
	for name, tc := range map[string]struct {
		in    zygote.Info
		shape []int64 // nil: no input
	}{
		"image":        {zygote.Info{Datatype: "FP32", Shape: []int64{-1, 3, -1, -1}}, []int64{1, 3, 64, 64}},
		"sequence":     {zygote.Info{Datatype: "FP32", Shape: []int64{-1, -1, 80}}, []int64{1, 1, 80}},
		"scalar":       {zygote.Info{Datatype: "FP32", Shape: []int64{}}, []int64{}},
		"tokens":       {zygote.Info{Datatype: "INT64", Shape: []int64{-1, -1}}, nil},
		"unknown":      {zygote.Info{Datatype: "FP32"}, nil},
		"nothing":      {zygote.Info{Datatype: "FP32", Shape: []int64{0, 3}}, nil},
		"huge":         {zygote.Info{Datatype: "FP32", Shape: []int64{1 << 20, 1 << 20}}, nil},
		"beyond int64": {zygote.Info{Datatype: "FP32", Shape: []int64{1<<62 + 1}}, nil},
	} {
		got, ok := smallest(tc.in)
		if ok != (tc.shape != nil) || ok && !slices.Equal(got.Shape, tc.shape) {
			t.Errorf("%s: shape %v, %v, want %v", name, got.Shape, ok, tc.shape)
		}
		if ok && got.Validate() != nil {
			t.Errorf("%s: %v", name, got.Validate())
		}
	}
}

// TestTouchRunsRealModels runs the real models that the function is deployed with.
func TestTouchRunsRealModels(t *testing.T) {
	for _, name := range []string{"rec.onnx", "det.onnx"} {
		m, err := zygote.Open(zygote.Options{Library: proctest.Built(t, "ort", "libonnxruntime.so.1"), Model: proctest.Built(t, "models", "ocr", name), Threads: 1, Start: 1})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		var log bytes.Buffer
		if touch(m, slog.New(slog.NewTextHandler(&log, nil))); log.Len() > 0 {
			t.Errorf("%s: %s", name, log.String())
		}
	}
}
