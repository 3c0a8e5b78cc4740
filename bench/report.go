// Package bench has code that the product's benchmarks share. [Load] sends requests to a server and
// counts the answers. A [Report] prints figures as an aligned table or as JSON.
//
// A figure for which the sample is too small is left out, never extrapolated.
package bench

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Report is the result of a benchmark.
type Report struct {
	Bench string  `json:"bench"`
	Host  Host    `json:"host"`
	Load  float64 `json:"load_average"` // over a minute, when the benchmark began
	// versions of the tools and libraries, by name
	Versions map[string]string `json:"versions,omitempty"`
	Results  []Result          `json:"results"`
	Notes    []Note            `json:"notes,omitempty"`
	Goals    []Goal            `json:"goals,omitempty"`
}

// Note is a remark on a case, for example why it has no figures.
type Note struct {
	Case string `json:"case"`
	Text string `json:"text"`
}

// Goal is a goal for a figure of the report.
type Goal struct {
	// for example "5.4G fork: ms from order to first output: at most 1000"
	Goal   string  `json:"goal"`
	Figure float64 `json:"figure"`
	Met    bool    `json:"met"`
}

// String says whether the goal is met.
func (g Goal) String() string {
	verdict := "missed"
	if g.Met {
		verdict = "met"
	}
	return fmt.Sprintf("goal: %s: %.4g, %s", g.Goal, g.Figure, verdict)
}

// Host is the machine that was measured.
type Host struct {
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"`
	Memory int64  `json:"memory_bytes"`
	Kernel string `json:"kernel"`
	Go     string `json:"go"`
	Date   string `json:"date"`
}

// Result is one figure: Value of Metric in Case, from N observations.
type Result struct {
	Case   string  `json:"case"`
	Metric string  `json:"metric"`
	Value  float64 `json:"value"`
	N      int     `json:"n"`
}

// NewReport reads the host and its load. If the machine is busy, it writes a warning to warn.
func NewReport(name string, warn io.Writer) *Report {
	r := &Report{Bench: name, Host: Host{
		CPU: procField("/proc/cpuinfo", "model name"), Cores: runtime.NumCPU(), Memory: memory(),
		Kernel: firstLine("/proc/sys/kernel/osrelease"), Go: runtime.Version(), Date: time.Now().UTC().Format(time.DateOnly),
	}}
	if _, err := fmt.Sscan(firstLine("/proc/loadavg"), &r.Load); err != nil {
		r.Load = math.NaN()
	}
	if r.Load > 1 {
		fmt.Fprintf(warn, "warning: the machine is busy (load average %.2f, want at most 1): the figures will be worse and less certain\n", r.Load)
	}
	return r
}

// Add appends a figure.
func (r *Report) Add(c, metric string, value float64, n int) {
	r.Results = append(r.Results, Result{c, metric, value, n})
}

// Note appends a note.
func (r *Report) Note(c, text string) { r.Notes = append(r.Notes, Note{c, text}) }

// With records the version of a tool or library.
func (r *Report) With(name, version string) {
	if r.Versions == nil {
		r.Versions = map[string]string{}
	}
	r.Versions[name] = version
}

// AddMillis appends the q-quantile of sample in milliseconds. If the sample is too small for it,
// AddMillis appends nothing.
func (r *Report) AddMillis(c, metric string, sample []time.Duration, q float64) {
	if v, ok := Quantile(sample, q); ok {
		r.Add(c, metric, float64(v)/float64(time.Millisecond), len(sample))
	}
}

// WriteJSON prints the report as one JSON object.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// WriteTable prints one line per case and one column per metric, then one line per note and goal.
func (r *Report) WriteTable(w io.Writer) error {
	var cases, metrics []string
	values := map[[2]string]string{}
	for _, x := range r.Results {
		if !slices.Contains(cases, x.Case) {
			cases = append(cases, x.Case)
		}
		if !slices.Contains(metrics, x.Metric) {
			metrics = append(metrics, x.Metric)
		}
		values[[2]string{x.Case, x.Metric}] = fmt.Sprintf("%.4g (n=%d)", x.Value, x.N)
	}
	fmt.Fprintf(w, "%s on %s, %d cores, %s, load %.2f, %s", r.Bench, r.Host.CPU, r.Host.Cores, r.Host.Go, r.Load, r.Host.Date)
	for _, name := range slices.Sorted(maps.Keys(r.Versions)) {
		fmt.Fprintf(w, ", %s %s", name, r.Versions[name])
	}
	fmt.Fprintln(w)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(t, "case\t%s\t\n", strings.Join(metrics, "\t"))
	for _, c := range cases {
		fmt.Fprint(t, c)
		for _, m := range metrics {
			fmt.Fprintf(t, "\t%s", values[[2]string{c, m}])
		}
		fmt.Fprint(t, "\t\n")
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, n := range r.Notes {
		fmt.Fprintf(w, "%s: %s\n", n.Case, n.Text)
	}
	for _, g := range r.Goals {
		fmt.Fprintln(w, g)
	}
	return nil
}

// Quantile returns the q-quantile (0 < q < 1) of sample by the nearest rank. ok is false if fewer
// than one observation is expected beyond it: a median needs 2, and a p99 needs 100.
func Quantile(sample []time.Duration, q float64) (v time.Duration, ok bool) {
	if float64(len(sample))*(1-q) < 1-1e-9 {
		return 0, false
	}
	s := slices.Sorted(slices.Values(sample))
	return s[max(0, int(math.Ceil(q*float64(len(s))))-1)], true
}

func memory() int64 {
	var kb int64
	_, _ = fmt.Sscan(procField("/proc/meminfo", "MemTotal"), &kb) // 0 if there is no such file
	return kb << 10
}

// procField returns the text after "name:" of the first line that begins so, or "".
func procField(file, name string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	for sc := bufio.NewScanner(f); sc.Scan(); {
		if k, v, ok := strings.Cut(sc.Text(), ":"); ok && strings.TrimSpace(k) == name {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

func firstLine(file string) string {
	b, err := os.ReadFile(file)
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return line
}
