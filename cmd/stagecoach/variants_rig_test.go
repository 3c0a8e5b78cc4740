package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// laneRig is a rig whose functions run the program testdata/lane. Each function has an image of its
// own, test/NAME:1, so that its processes are known by the image.
type laneRig struct {
	*rig
	images string

	mu  sync.Mutex
	ran map[string]map[int]bool // by replica: numbers of the calls whose answers came
}

// startLanes runs up with the images of these functions, beside the built ones.
func startLanes(t *testing.T, names ...string) *laneRig {
	t.Helper()
	return startLanesWith(t, nil, names...)
}

// startLanesWith is startLanes with flags of up.
func startLanesWith(t *testing.T, flags []string, names ...string) *laneRig {
	t.Helper()
	l := &laneRig{images: t.TempDir(), ran: map[string]map[int]bool{}}
	if err := os.Symlink(proctest.Built(t, "images", "stagecoach"), filepath.Join(l.images, "stagecoach")); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "stage")
	if out, err := exec.Command("go", "build", "-o", program, "./testdata/lane").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	model := proctest.Built(t, "images", "stagecoach", "wait", "0.1.0", "model", "rec.onnx")
	for _, name := range names {
		image := filepath.Join(l.images, "test", name, "1")
		err := os.MkdirAll(filepath.Join(image, "model"), 0o755)
		if err == nil {
			err = os.Link(program, filepath.Join(image, "stage"))
		}
		if err == nil {
			err = proctest.Copy(model, filepath.Join(image, "model", "rec.onnx"))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	l.rig = start(t, append(flags, "--images", l.images)...)
	return l
}

// lane returns a function with forked replicas.
func (l *laneRig) lane(name string, annotations map[string]string) fn {
	return fn{name, "test/" + name + ":1", map[string]string{"min": "1", "max": "2"}, annotations, map[string]string{
		"STAGECOACH_MODEL": "model/rec.onnx", "lane_version": "1",
	}}
}

// inVersion returns f in its n-th version.
func inVersion(f fn, n int) fn {
	f = updated(f, n)
	f.env["lane_version"] = fmt.Sprint(n)
	return f
}

// remove removes a function.
func (r *rig) remove(name string) {
	r.t.Helper()
	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"`+name+`"}`)
}

// file creates a file in the folder of a function's image, or removes it.
func (l *laneRig) file(function, name string, there bool) {
	l.t.Helper()
	path := filepath.Join(l.images, "test", function, "1", name)
	var err error
	if there {
		err = os.WriteFile(path, nil, 0o644) //nolint:gosec // other users look for it
	} else {
		err = os.Remove(path)
	}
	if err != nil {
		l.t.Fatal(err)
	}
}

// count records that the answer to a call has come. A second answer to a call is an error.
func (l *laneRig) count(s said) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ran[s.replica] == nil {
		l.ran[s.replica] = map[int]bool{}
	}
	if l.ran[s.replica][s.call] {
		l.t.Errorf("call %d of %s was answered twice: %+v", s.call, s.replica, s)
	}
	l.ran[s.replica][s.call] = true
}

// ranOnce checks that the answer to each call has come. So no request had a call that ran twice.
func (l *laneRig) ranOnce() {
	l.t.Helper()
	l.mu.Lock()
	defer l.mu.Unlock()
	for replica, calls := range l.ran {
		for n := range len(calls) {
			if !calls[n+1] {
				l.t.Errorf("%s ran call %d, and its answer is missing among %d", replica, n+1, len(calls))
			}
		}
	}
	if n := l.value("stagecoach_flow_retries_total"); n != 0 {
		l.t.Errorf("%v calls retried, want none", n)
	}
}

// said is what a replica of a function answered.
type said struct {
	function string
	version  int
	replica  string
	call     int // the replica's calls up to this one
	input    string
}

// parseSaid parses the answer to a call.
func parseSaid(text string) (s said, err error) {
	f := strings.SplitN(text, " ", 5)
	if len(f) != 5 {
		return s, fmt.Errorf("answer %.300q, want a function, its version, its replica, a number and its input", text)
	}
	s.function, s.replica, s.input = f[0], f[2], f[4]
	if s.version, err = strconv.Atoi(f[1]); err == nil {
		s.call, err = strconv.Atoi(f[3])
	}
	return s, err
}

// by checks an answer to a request with one item, and returns the function that it is from.
func (l *laneRig) by(body string, a client.Answer) (said, error) {
	s, err := parseSaid(string(a.Body))
	if a.Status != http.StatusOK || err != nil || s.input != body {
		return s, fmt.Errorf("status %d, dropped %q, %.300q, want 200 and what was sent", a.Status, a.Header.Get("X-Dropped"), a.Body)
	}
	l.count(s)
	return s, nil
}

// itemsBy checks an answer to a request with several items. All items that one function answered
// are from one version of the function.
func (l *laneRig) itemsBy(body string, status int, answer []byte) ([]said, error) {
	var sent, got []string
	if err := json.Unmarshal([]byte(body), &sent); err != nil {
		return nil, err
	}
	if err := json.Unmarshal(answer, &got); status != http.StatusOK || err != nil || len(got) != len(sent) {
		return nil, fmt.Errorf("status %d, %.300q, want 200 and %d items", status, answer, len(sent))
	}
	all, versions := make([]said, len(got)), map[string]int{}
	for i := range got {
		s, err := parseSaid(got[i])
		if err == nil && s.input != sent[i] {
			err = fmt.Errorf("answer %q, want that of %q", got[i], sent[i])
		}
		if err != nil {
			return nil, fmt.Errorf("item %d: %w", i, err)
		}
		if v, ok := versions[s.function]; ok && v != s.version {
			return nil, fmt.Errorf("versions %d and %d of %s answered one request: %q", v, s.version, s.function, got)
		}
		versions[s.function], all[i] = s.version, s
		l.count(s)
	}
	return all, nil
}

// table returns the shares of a stage's levels as clients get them, such as "64: a 1; any: b 0.5, c
// 0.5"; empty: there is no table.
func (r *rig) table(pipeline, stage string) string {
	r.t.Helper()
	var e schema.Explanation
	if err := r.Get(r.t.Context(), "/system/pipelines/"+pipeline+"/explain", &e); err != nil {
		r.t.Fatal(err)
	}
	i := slices.IndexFunc(e.Stages, func(s schema.ExplainedStage) bool { return s.Name == stage })
	if i < 0 || e.Stages[i].Table == nil {
		return ""
	}
	var levels []string
	for _, row := range e.Stages[i].Table.Rows {
		if slices.Contains(row.From, "client") || len(e.Stages[i].Table.Rows) == 1 {
			for _, l := range row.Levels {
				var shares []string
				for _, s := range l.Shares {
					shares = append(shares, fmt.Sprintf("%s %.2g", s.Lane, s.Part))
				}
				slices.Sort(shares)
				length := "any"
				if l.MaxLength > 0 {
					length = fmt.Sprint(l.MaxLength)
				}
				levels = append(levels, length+": "+strings.Join(shares, ", "))
			}
		}
	}
	return strings.Join(levels, "; ")
}

// hasTable waits until the stage's table is this one.
func (r *rig) hasTable(pipeline, stage, want string) {
	r.t.Helper()
	got := ""
	defer func() {
		if got != want {
			r.t.Logf("the table of %s is %q, want %q", stage, got, want)
		}
	}()
	r.until(late, "the table of "+stage, func() bool { got = r.table(pipeline, stage); return got == want })
}

// status returns a pipeline as the API describes it.
func (r *rig) status(pipeline string) (p provider.PipelineStatus) {
	r.t.Helper()
	if err := r.Get(r.t.Context(), "/system/pipelines/"+pipeline, &p); err != nil {
		r.t.Fatal(err)
	}
	return p
}

// says returns a function's status.
func (r *rig) says(function string) string {
	r.t.Helper()
	s := r.shows(function)
	return s.Status()
}
