package arrivals

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// traces has a few made-up lines in each format.
var traces = map[string]struct {
	text, column string
	format       Format // format to select besides Auto, and whether Auto detects it
	auto         bool
	counts       []float64
	times        []int // milliseconds
	length       time.Duration
}{
	"counts":         {"# a comment\n3\n0\n\n5\n", "", Counts, true, []float64{3, 0, 5}, nil, 3 * time.Second},
	"counts in CSV":  {"second_of_day,creates,deletes\n100,3,1\n101,4,1\n104,6,2\n", "", Counts, true, []float64{3, 4, 0, 0, 6}, nil, 5 * time.Second},
	"another column": {"second_of_day,creates,deletes\n100,3,1\n101,4,2\n", "deletes", Counts, true, []float64{1, 2}, nil, 2 * time.Second},
	"a hole":         {"4\n" + strings.Repeat("0\n", 599) + "5\n" + strings.Repeat("0\n", 600) + "6\n", "", Twitter, false, append(append([]float64{4}, make([]float64, 599)...), 5, 6), nil, 602 * time.Second},
	"seconds":        {"10.5\n10.25\n12.5\n", "", Timestamps, true, nil, []int{0, 250, 2250}, 3 * time.Second},
	"seconds in CSV": {"req_time_s,tenant\n0.0,1\n0.5,2\n", "", Timestamps, true, nil, []int{0, 500}, 750 * time.Millisecond},
	"RFC 3339":       {"2023-11-16T18:00:00Z\n2023-11-16T18:00:01.5Z\n", "", Timestamps, true, nil, []int{0, 1500}, 2250 * time.Millisecond},
	"azure-llm":      {"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.1000000,10,2\n2023-11-16 18:00:01.6000000,4,7\n", "", AzureLLM, true, nil, []int{0, 1500}, 2250 * time.Millisecond},
	"mooncake":       {`{"timestamp": 0, "input_length": 5}` + "\n" + `{"timestamp": 3000, "hash_ids": [1]}` + "\n", "", Mooncake, true, nil, []int{0, 3000}, 4500 * time.Millisecond},
	"minutes":        {"HashOwner,HashApp,HashFunction,Trigger,1,2,3\no,a,f1,http,1,2,3\no,a,f2,http,0,0,4\n", "", AzureFunction, true, []float64{1, 2, 7}, nil, 3 * time.Minute},
	"one's minutes":  {"HashOwner,HashApp,HashFunction,Trigger,1,2,3\no,a,f1,http,1,2,3\no,a,f2,http,0,0,4\n", "f2", AzureFunction, true, []float64{0, 0, 4}, nil, 3 * time.Minute},
	"instants":       {"second,name\n2.5,b\n0.25,a\n1.5,a\n", "a", Instants, true, nil, []int{250, 1500}, 2250 * time.Millisecond},
	"all instants":   {"second,name\n2.5,b\n0.25,a\n1.5,a\n", "", Instants, true, nil, []int{250, 1500, 2500}, 3333333333},
	"invocations":    {"app,func,end_timestamp,duration\na,f,3.0,1.0\na,g,2.5,1.5\n", "", AzureInvoke, true, nil, []int{0, 1000}, 1500 * time.Millisecond},
}

func TestReadTrace(t *testing.T) {
	for name, tc := range traces {
		var zipped bytes.Buffer
		z := gzip.NewWriter(&zipped)
		_, _ = z.Write([]byte(tc.text))
		_ = z.Close()
		for text, format := range map[string]Format{tc.text: tc.format, zipped.String(): Auto} {
			if format == Auto && !tc.auto {
				continue
			}
			got, err := ReadTrace(strings.NewReader(text), format, tc.column)
			if err != nil {
				t.Errorf("%s, %s: %v", name, format, err)
				continue
			}
			var ms []int
			for _, at := range got.Times {
				ms = append(ms, int(at/time.Millisecond))
			}
			if !slices.Equal(got.Counts, tc.counts) || !slices.Equal(ms, tc.times) || got.Length != tc.length {
				t.Errorf("%s, %s: %v, %v ms, %v long; want %v, %v ms, %v", name, format, got.Counts, ms, got.Length, tc.counts, tc.times, tc.length)
			}
		}
	}
}

func TestReadTraceSaysWhatIsWrong(t *testing.T) {
	for name, tc := range map[string]struct {
		format             Format
		text, column, want string
	}{
		"a line without end": {Auto, strings.Repeat("\x00", maxLine+1), "", "trace, line 1: longer than 4194304 bytes, want text"},
		"no such format":     {"csv", "1\n", "", "want one of"},
		"nothing":            {Auto, "", "", "nothing arrives"},
		"zeros":              {Counts, "0\n0\n", "", "nothing arrives in 2 lines"},
		"no such column":     {Counts, "second,a,b\n1,2,3\n", "c", `no column "c", want one of ["a" "b"]`},
		"a count of what":    {Counts, "1\nx\n", "", `line 2: count "x"`},
		"a negative count":   {Counts, "-1\n", "", "count"},
		"time goes back":     {Counts, "9,1\n8,1\n", "", "line 2: count of 8"},
		"far away":           {Counts, "0,1\n9999999999,1\n", "", "50000000"},
		"neither":            {Timestamps, "1\nyesterday\n", "", `line 2: instant "yesterday"`},
		"dates and seconds":  {Timestamps, "1\n2023-11-16 18:00:00\n", "", "dates and seconds"},
		"an instant alone":   {Instants, "second,name\n1\n", "", `line 2: "1", want SECOND,NAME`},
		"a time before":      {Instants, "second,name\n-1,a\n", "", "0 to 9e9"},
		"nobody's instants":  {Instants, "second,name\n1,a\n", "b", `nothing arrives in 2 lines (column "b")`},
		"no timestamp":       {Mooncake, "{}\n", "", `"timestamp"`},
		"no JSON":            {Mooncake, "{\n", "", "line 1"},
		"no function":        {AzureFunction, "HashOwner,a,b,c,1\no,a,f,http,1\n", "g", `column "g"`},
		"cut short":          {AzureInvoke, "app,func,end_timestamp,duration\na,f\n", "", "2 fields"},
	} {
		if _, err := ReadTrace(strings.NewReader(tc.text), tc.format, tc.column); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}

// FuzzReadTrace checks that every trace that can be read can be played: its instants ascend, and
// their number is as announced.
func FuzzReadTrace(f *testing.F) {
	for _, tc := range traces {
		f.Add(tc.text, tc.column)
	}
	f.Fuzz(func(t *testing.T, text, column string) {
		tr, err := ReadTrace(strings.NewReader(text), Auto, column)
		if err != nil || tr.Arrivals() > 10_000 || len(tr.Counts) > 100_000 {
			return
		}
		s, err := tr.Replay(Replay{Spread: Even}, 1)
		if err != nil {
			t.Fatalf("read but not to be played: %v", err)
		}
		n, last := 0.0, time.Duration(0)
		for at, ok := s.Next(); ok; at, ok = s.Next() {
			if at < last || at > tr.Length {
				t.Fatalf("%v after %v, of %v", at, last, tr.Length)
			}
			n, last = n+1, at
		}
		if tr.Counts == nil && n != tr.Arrivals() {
			t.Fatalf("%g played, want %g", n, tr.Arrivals())
		}
	})
}

func FuzzParseProfile(f *testing.F) {
	for _, s := range []string{"20", "2:10s,2..20:30s,20:1m", "1..0:1ns,5"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParseProfile(text)
		if err != nil {
			return
		}
		if again, err := ParseProfile(p.String()); err != nil || again.String() != p.String() {
			t.Fatalf("%q prints as %q: %v", text, p, err)
		}
		s, err := Renewal(p, 1, 1)
		if err != nil {
			t.Fatal(err)
		}
		last := time.Duration(0)
		for range 100 {
			at, ok := s.Next()
			if !ok {
				break
			}
			if at < last {
				t.Fatalf("%v after %v", at, last)
			}
			last = at
		}
	})
}

// TestRealTraces reads the published traces that are on the machine, and compares them with their
// descriptions.
func TestRealTraces(t *testing.T) {
	dir := cmp.Or(os.Getenv("STAGECOACH_DATA"), "../../../../shared/data")
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("no traces: set STAGECOACH_DATA to their folder: %v", err)
	}
	for file, tc := range map[string]struct {
		format Format
		n      float64
		length time.Duration // to within 1 %
	}{
		"azure-llm-2023/AzureLLMInferenceTrace_code.csv.gz": {Auto, 8819, 3436 * time.Second},
		"azure-llm-2023/AzureLLMInferenceTrace_conv.csv.gz": {Auto, 19366, 3502 * time.Second},
		"mooncake/conversation_trace.jsonl.gz":              {Auto, 12031, 3537 * time.Second},
		"twitter/twitter-2018-04-25_30min_rps.csv":          {Auto, 58454, 1801 * time.Second},
		"twitter/twitter-2021-08_rps.txt.gz":                {Twitter, 63.6 * 1899061, 1899061*time.Second - 21*1739*time.Second},
		"azure-functions/azure2019_sample3_invocations.csv": {Auto, 0, 24 * time.Hour},
		"azure-functions/azure2021_sample200.csv":           {Auto, 199, 1206 * time.Second},
		"vtc/arena_trace.csv":                               {Auto, 1500, 600 * time.Second},
	} {
		f, err := os.Open(filepath.Join(dir, file))
		if err != nil {
			t.Error(err)
			continue
		}
		tr, err := ReadTrace(f, tc.format, "")
		f.Close()
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		near := func(a, b, by float64) bool { return a > b*(1-by) && a < b*(1+by) }
		if tc.n > 0 && !near(tr.Arrivals(), tc.n, 0.001) || !near(tr.Length.Seconds(), tc.length.Seconds(), 0.01) {
			t.Errorf("%s: %.0f arrivals in %v, want about %.0f in %v", file, tr.Arrivals(), tr.Length, tc.n, tc.length)
		}
	}
}
