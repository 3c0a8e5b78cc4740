package quart

import (
	"bufio"
	"cmp"
	"encoding/csv"
	"io"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench/load/arrivals"
)

// data returns the folder with public traces and profiles. They are not part of the repository. If
// the folder is missing, data skips the test.
func data(t *testing.T) string {
	dir := cmp.Or(os.Getenv("STAGECOACH_DATA"), "../../../../shared/data")
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("no data: set STAGECOACH_DATA to its folder: %v", err)
	}
	return dir
}

// rows reads a CSV file.
func rows(t *testing.T, dir, name string) [][]string {
	t.Helper()
	f, err := os.Open(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out, err := csv.NewReader(bufio.NewReader(f)).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func number(t *testing.T, text string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(text, 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func near(a, b, part float64) bool { return math.Abs(a-b) <= part*math.Abs(b) }

// TestSizesMatchTheReleasedOnes compares the sizes of stages with the released ones.
func TestSizesMatchTheReleasedOnes(t *testing.T) {
	sizes := map[string]float64{} // by cut and function
	for _, r := range rows(t, data(t), "quart/stage_sizes_gb.csv")[1:] {
		sizes[r[2]+" "+r[1]] = number(t, r[3])
		if strings.HasSuffix(r[2], "-whole") {
			sizes[r[0]] += number(t, r[3])
		}
	}
	check := func(m Model, cut, prefix string) {
		t.Helper()
		for i, size := range m.GiB {
			if want := sizes[cut+" "+prefix+strconv.Itoa(i)]; !near(size, want, 1e-6) {
				t.Errorf("%s, stage %d: %g GiB, want %g", m.Name, i, size, want)
			}
		}
	}
	models := Models()
	check(models[0], "PARAM-8", "bert-21b-submod-")
	check(models[3], "PARAM-8", "opt-66b-submod-")
	check(bert5(), "ME-5", "bert-21b-submod-")
	for i, name := range []string{"BERT", "LLAMA", "WHISPER", "GPT"} {
		if got := models[i].Size(); !near(got, sizes[name], 1e-4) {
			t.Errorf("%s: %g GiB, want %g", name, got, sizes[name])
		}
	}
	// The layers of OPT-66B show that the file counts in GiB.
	if layer := 12 * 9216 * 9216 * 2.0 / gib; !near(sizes["PARAM-8 opt-66b-submod-1"], 9*layer, 1e-3) {
		t.Errorf("nine layers of OPT-66B are %g GiB, and %g in the file", 9*layer, sizes["PARAM-8 opt-66b-submod-1"])
	}
}

// TestTimesMatchTheReleasedOnes compares Table 1 with the released times: each of n stages must
// take Time/n plus a few ms.
func TestTimesMatchTheReleasedOnes(t *testing.T) {
	models := map[string]Model{"bert-21b": Models()[0], "opt-66b": Models()[3], "whishper-9b": Models()[2]}
	for _, r := range rows(t, data(t), "quart/model_config.csv")[1:] {
		m, ok := models[r[0]]
		if !ok {
			continue // LLAMA-7B: measured with fewer than 1024 tokens
		}
		n := number(t, r[1])
		if passing := number(t, r[2]) - m.Time.Seconds()/n; passing < -0.0015 || passing > 0.008 {
			t.Errorf("%s in %g: %s s a stage, %g s of passing on, want up to 8 ms", r[0], n, r[2], passing)
		}
	}
}

// TestBatchCostMatchesFasterTransformer compares the cost of a batch with FasterTransformer's
// BERT-6B.
func TestBatchCostMatchesFasterTransformer(t *testing.T) {
	ms := map[string]float64{}
	for _, r := range rows(t, data(t), "bert-latency/fastertransformer_bert.csv") {
		if r[2] == "A100" && r[3] == "TP1, PP1" && r[6] == "128" {
			ms[r[5]] = number(t, r[7])
		}
	}
	if got := (ms["4"]/ms["1"] - 1) / 3; !near(got, bertBatch, 1e-6) {
		t.Errorf("a further call costs %g of the first, want %g", bertBatch, got)
	}
}

// TestCachedLoadsMatchServerlessLLM compares loads from the page cache with ServerlessLLM's.
func TestCachedLoadsMatchServerlessLLM(t *testing.T) {
	sum, n := 0.0, 0.0
	for _, r := range rows(t, data(t), "serverlessllm/load_times.csv")[1:] {
		if r[0] == "h100_2025" && r[1] == "cached" && (r[2] == "Qwen_Qwen3-32B_safetensors_5_cached.json" || r[2] == "deepseek-ai_DeepSeek-R1-Distill-Qwen-32B_safetensors_5_cached.json") {
			sum, n = sum+number(t, r[4]), n+1
		}
	}
	if got := sum / n / 65.52; n != 10 || !near(got, cachedPerGB, 1e-3) {
		t.Errorf("%g s for each GB of %g loads, want %g of ten", got, n, cachedPerGB)
	}
}

// TestTracesPlayTheRequestedLoad plays every trace with every seed. The mean load must be about the
// requested one. Windows for training and for comparison must not overlap.
func TestTracesPlayTheRequestedLoad(t *testing.T) {
	dir := data(t)
	open := func(name string) (io.ReadCloser, error) { return os.Open(filepath.Join(dir, name)) }
	for _, tr := range traces() {
		all, err := tr.read(open)
		if err != nil {
			t.Fatal(err)
		}
		m := Models()[0]
		var last time.Duration // end of the last window
		for _, train := range []bool{true, false} {
			begin := tr.windows(all.Length, train)
			for _, at := range begin {
				if at < last || at+window > all.Length || train && at+window > tr.first {
					t.Errorf("%s: a window from %v on of %v, want one after %v", tr.Name, at, all.Length, last)
				}
				last = at + window
			}
			if len(begin) < 2 {
				t.Errorf("%s: %d windows for training %t, want 2 or more", tr.Name, len(begin), train)
			}
		}
		total, runs := 0.0, 0.0
		var cv moments
		for i := range uint64(testSeeds.N) {
			s, err := tr.play(all, m.Rate(), false, testSeeds.First+i)
			if err != nil {
				t.Fatal(err)
			}
			total += float64(cv.count(s))
			runs++
		}
		rate := total / runs / window.Seconds()
		if !near(rate, m.Rate(), 0.2) {
			t.Errorf("%s: %g requests a second in the comparison, want about %g", tr.Name, rate, m.Rate())
		}
		t.Logf("%-10s %5.0f s, %6.0f arrivals recorded; played to %s: %.1f a second, CV of gaps %.2f", tr.Name, all.Length.Seconds(), all.Arrivals(), m.Name, rate, cv.cv())
	}
}

// moments holds the moments of gaps.
type moments struct{ n, sum, squares float64 }

// count adds the gaps of a source.
func (m *moments) count(s arrivals.Source) (n int) {
	last := time.Duration(0)
	for at, ok := s.Next(); ok; at, ok = s.Next() {
		gap := (at - last).Seconds()
		m.n, m.sum, m.squares, last = m.n+1, m.sum+gap, m.squares+gap*gap, at
		n++
	}
	return n
}

func (m *moments) cv() float64 {
	mean := m.sum / m.n
	return math.Sqrt(m.squares/m.n-mean*mean) / mean
}
