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
	folder string // of the files by which the test and the stages meet
}

// startLanes runs up with the images of these functions, beside the built ones.
func startLanes(t *testing.T, names ...string) *laneRig {
	t.Helper()
	l := &laneRig{images: t.TempDir()}
	// Functions are users of their own, and a test's folder has a parent that is closed to them.
	folder, err := os.MkdirTemp("", "lanes")
	if err == nil {
		err = os.Chmod(folder, 0o777) //nolint:gosec // every user writes to it
	}
	if err == nil {
		err = os.Symlink(proctest.Built(t, "images", "stagecoach"), filepath.Join(l.images, "stagecoach"))
	}
	if err != nil {
		t.Fatal(err)
	}
	l.folder = folder
	t.Cleanup(func() { os.RemoveAll(folder) })
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
	l.rig = start(t, "--images", l.images)
	return l
}

// lane returns a function with forked replicas.
func (l *laneRig) lane(name string, annotations map[string]string) fn {
	return fn{name, "test/" + name + ":1", map[string]string{"min": "1", "max": "2"}, annotations, map[string]string{
		"STAGECOACH_MODEL": "model/rec.onnx", "lane_folder": l.folder, "lane_version": "1",
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

// file creates a file in the folder of the stages, or removes it.
func (l *laneRig) file(name string, there bool) {
	l.t.Helper()
	path := filepath.Join(l.folder, name)
	err := os.Remove(path)
	if there {
		err = os.WriteFile(path, nil, 0o644) //nolint:gosec // other users look for it
	}
	if err != nil {
		l.t.Fatal(err)
	}
}

// ran returns how often a call with each input has run in the function, or in all functions that
// have the prefix.
func (l *laneRig) ran(prefix string) map[string]int {
	l.t.Helper()
	files, err := filepath.Glob(filepath.Join(l.folder, "calls-"+prefix+"*"))
	if err != nil {
		l.t.Fatal(err)
	}
	out := map[string]int{}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			l.t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			out[strings.TrimSpace(line)]++
		}
	}
	return out
}

// said is what a replica of a function answered.
type said struct {
	function string
	version  int
	input    string
}

// parseSaid parses the answer to a call.
func parseSaid(text string) (s said, err error) {
	f := strings.SplitN(text, " ", 3)
	if len(f) != 3 {
		return s, fmt.Errorf("answer %.300q, want a function, its version and its input", text)
	}
	s.function, s.input = f[0], f[2]
	s.version, err = strconv.Atoi(f[1])
	return s, err
}

// by checks an answer to a request with one item, and returns the function that it is from.
func by(body string, a client.Answer) (said, error) {
	s, err := parseSaid(string(a.Body))
	if a.Status != http.StatusOK || err != nil || s.input != body {
		return s, fmt.Errorf("status %d, dropped %q, %.300q, want 200 and what was sent", a.Status, a.Header.Get("X-Dropped"), a.Body)
	}
	return s, nil
}

// itemsBy checks an answer to a request with several items. All items that one function answered
// are from one version of the function.
func itemsBy(body string, status int, answer []byte) ([]said, error) {
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
		if err != nil || s.input != sent[i] {
			return nil, fmt.Errorf("item %d: %q, %v, want that of %q", i, got[i], err, sent[i])
		}
		if v, ok := versions[s.function]; ok && v != s.version {
			return nil, fmt.Errorf("versions %d and %d of %s answered one request: %q", v, s.version, s.function, got)
		}
		versions[s.function], all[i] = s.version, s
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
		if r.t.Failed() {
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
