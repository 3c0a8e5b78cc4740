package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/netnstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Limits of waits. They are long, because test machines are slow. A test that works waits for a
// fraction of them.
const (
	soon = time.Minute
	late = 3 * time.Minute
)

// rig is a running `stagecoach up` and its client.
type rig struct {
	*client.Client
	t     *testing.T
	up    *child.Process
	log   *logFile
	state string
	args  []string
	ctr   *containerdtest.Server // nil: functions run in processes
	on    *netnstest.Machine     // nil: the test's
}

// logFile collects what up prints.
type logFile struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logFile) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logFile) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// start runs up on a state folder of its own, with the built images and ONNX Runtime unless flags
// say otherwise. At the end of the test, up is stopped. It must end well and leave no process.
func start(t *testing.T, flags ...string) *rig {
	t.Helper()
	return startRig(t, &rig{t: t, log: &logFile{}, state: t.TempDir()}, flags...)
}

// startRig does the same as start with a rig that has its log and its state folder.
func startRig(t *testing.T, r *rig, flags ...string) *rig {
	t.Helper()
	r.args = append([]string{
		"up", "--listen", "127.0.0.1:0", "--state", r.state, "--images", proctest.Built(t, "images"),
		"--ort", proctest.Built(t, "ort", "libonnxruntime.so.1"),
	}, flags...)
	t.Cleanup(func() {
		if r.up != nil {
			r.stop()
		}
		log := r.log.String()
		if crashed(log) {
			t.Error("a race or panic, see the log")
		}
		if t.Failed() {
			t.Logf("the end of up's log:\n%s", log[max(0, len(log)-6000):])
		}
	})
	r.restart()
	return r
}

// restart runs up, again, on the same state folder.
func (r *rig) restart() {
	r.t.Helper()
	var err error
	program, args := os.Args[0], r.args
	if r.on != nil {
		program, args = "nsenter", append([]string{"--net=" + r.on.Namespace(), program}, args...)
	}
	// The test's own context ends before its cleanup.
	if r.up, err = child.StartProgram(context.Background(), program, r.log, args...); err != nil {
		r.t.Fatal(err)
	}
	r.Client = client.New("http://" + r.up.Addr)
	if r.on != nil {
		r.HTTP.Transport = &http.Transport{DialContext: r.on.Dial, MaxIdleConnsPerHost: 16}
	}
}

// stop ends up as an operator does.
func (r *rig) stop() {
	r.t.Helper()
	left := r.descendants()
	if err := r.up.Stop(); err != nil {
		r.t.Errorf("up ended with %v, want exit status 0", err)
	}
	r.up = nil
	gone(r.t, left)
}

// kill kills up, and returns when it and all processes that it had started have ended.
func (r *rig) kill() {
	r.t.Helper()
	left := r.descendants()
	if len(left) == 0 {
		r.t.Error("up has no processes: its end proves nothing")
	}
	r.end9()
	gone(r.t, left)
}

// end9 kills up, and returns when it has ended. Its processes may go on.
func (r *rig) end9() {
	r.t.Helper()
	if err := r.up.Cmd.Process.Kill(); err != nil {
		r.t.Error(err)
	}
	<-r.up.Done
	r.up = nil
}

// process is one that descends from up.
type process struct {
	pid, parent int
	start       string // when, as the kernel has it: a pid alone may be used again
	image       string // of the function, such as wait
	zygote      bool
}

func gone(t *testing.T, all []process) {
	t.Helper()
	proctest.Until(t, "no process to be left", func() bool {
		return !slices.ContainsFunc(all, func(p process) bool {
			now, err := readProcess(p.pid)
			return err == nil && now.start == p.start
		})
	})
}

// readProcess reads /proc; a process that has ended and waits for its parent is none.
func readProcess(pid int) (process, error) {
	dir := filepath.Join("/proc", strconv.Itoa(pid))
	b, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err != nil {
		return process{}, err
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:])) // from the third field on
	if len(f) < 20 || f[0] == "Z" || f[0] == "X" {
		return process{}, os.ErrProcessDone
	}
	p := process{pid: pid, start: f[19]}
	if p.parent, err = strconv.Atoi(f[1]); err != nil {
		return process{}, err
	}
	// The folder is IMAGES/stagecoach/NAME/VERSION.
	if cwd, err := os.Readlink(filepath.Join(dir, "cwd")); err == nil {
		p.image = filepath.Base(filepath.Dir(cwd))
	}
	env, err := os.ReadFile(filepath.Join(dir, "environ"))
	p.zygote = err == nil && bytes.Contains(env, []byte(wire.EnvZygoteFD+"="))
	return p, nil
}

// spare reports whether a process is a zygote's child that is no replica yet.
func spare(pid int) bool {
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return err == nil && string(comm) == "spare\n"
}

// allProcesses returns the machine's processes.
func allProcesses() []process {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		panic(err)
	}
	var all []process
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if p, err := readProcess(pid); err == nil {
				all = append(all, p)
			}
		}
	}
	return all
}

// crashed reports whether the log of a program has a race or a panic of its own. The panic of a
// function is in the middle of a line.
func crashed(log string) bool {
	return strings.Contains(log, "DATA RACE") || strings.Contains("\n"+log, "\npanic: ")
}

// descendants returns the zygotes and replicas of the rig's up.
func (r *rig) descendants() []process { return descendants(r.parents()...) }

// parents returns the processes whose children are zygotes and replicas: up, and with containers
// their first processes.
func (r *rig) parents() []int {
	out := []int{r.up.Cmd.Process.Pid}
	if r.ctr != nil {
		for _, shim := range r.ctr.Shims() {
			out = append(out, proctest.Children(r.t, shim)...)
		}
	}
	return out
}

// descendants returns the zygotes and replicas that are children of these processes, sorted by pid.
// Replicas have the environment of their zygote, so only their parent shows that they are replicas.
func descendants(parents ...int) []process {
	all := allProcesses()
	var out []process
	for _, p := range all {
		if slices.Contains(parents, p.parent) {
			out = append(out, p)
			for _, c := range all {
				if c.parent == p.pid && !spare(c.pid) {
					c.zygote = false
					out = append(out, c)
				}
			}
		}
	}
	slices.SortFunc(out, func(a, b process) int { return cmp.Compare(a.pid, b.pid) })
	return out
}

// pids returns the processes of an image's zygotes, or its replicas.
func (r *rig) pids(image string, zygotes bool) []int {
	var out []int
	for _, p := range r.descendants() {
		if p.image == image && p.zygote == zygotes {
			out = append(out, p.pid)
		}
	}
	return out
}

func kill9(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Errorf("kill -9 %d: %v", pid, err)
	}
}

// fn is a function of a test: the image NAME is stagecoach/NAME:0.1.0.
type fn struct {
	name, image string
	labels      map[string]string // after com.openfaas.scale.
	annotations map[string]string // after stagecoach.dev/
	env         map[string]string
}

func (f fn) deployment() client.Deployment {
	d := client.Deployment{Service: f.name, Image: f.image, EnvVars: f.env, Labels: map[string]string{}, Annotations: map[string]string{}}
	if !strings.Contains(f.image, ":") {
		d.Image = "stagecoach/" + f.image + ":0.1.0"
	}
	for k, v := range f.labels {
		d.Labels["com.openfaas.scale."+k] = v
	}
	for k, v := range f.annotations {
		d.Annotations["stagecoach.dev/"+k] = v
	}
	return d
}

// waitFn returns a function whose calls hold a slot for exactly the given time. Its replicas are
// forked from a zygote.
func waitFn(name, mean string, labels, annotations map[string]string) fn {
	return fn{name, "wait", labels, annotations, map[string]string{"STAGECOACH_MODEL": "model/rec.onnx", "wait_mean": mean, "wait_cv": "0"}}
}

func (r *rig) deployAll(fns ...fn) {
	r.t.Helper()
	for _, f := range fns {
		if err := r.Deploy(r.t.Context(), f.deployment()); err != nil {
			r.t.Fatal(err)
		}
	}
}

// send sends a request with headers, given as name, value. It fails the test if no answer comes.
func (r *rig) send(method, path, body string, header ...string) client.Answer {
	r.t.Helper()
	a, err := r.trySend(method, path, body, header...)
	if err != nil {
		r.t.Errorf("%s %s: %v", method, path, err)
	}
	return a
}

func (r *rig) trySend(method, path, body string, header ...string) (client.Answer, error) {
	// An answer is wanted even after the test has failed.
	req, err := http.NewRequest(method, r.Base+path, strings.NewReader(body))
	if err != nil {
		return client.Answer{}, err
	}
	req.Header.Set("Content-Type", "text/plain")
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	begin := time.Now()
	resp, err := r.HTTP.Do(req)
	if err != nil {
		return client.Answer{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return client.Answer{Status: resp.StatusCode, Header: resp.Header, Body: b, Took: time.Since(begin)}, err
}

// must sends a request that has to be answered with this status.
func (r *rig) must(status int, method, path, body string, header ...string) client.Answer {
	r.t.Helper()
	a := r.send(method, path, body, header...)
	if a.Status != status {
		r.t.Fatalf("%s %s: status %d, want %d: %s", method, path, a.Status, status, a.Body)
	}
	return a
}

// shows returns a function as the API describes it.
func (r *rig) shows(name string) (s client.FunctionStatus) {
	r.t.Helper()
	a := r.must(http.StatusOK, http.MethodGet, "/system/function/"+name, "")
	if err := json.Unmarshal(a.Body, &s); err != nil {
		r.t.Fatal(err)
	}
	return s
}

func (r *rig) line(name string) schema.Timeline {
	r.t.Helper()
	tl, err := r.Timeline(context.Background(), name)
	if err != nil {
		r.t.Fatal(err)
	}
	return tl
}

// events returns those of a kind.
func (r *rig) events(name, kind string) []schema.Event {
	r.t.Helper()
	return slices.DeleteFunc(r.line(name).Events, func(e schema.Event) bool { return e.Kind != kind })
}

// starts returns the starts of a function's replicas whose processes run. Others may be ordered.
func (r *rig) starts(name string) []client.ReplicaStart {
	r.t.Helper()
	return slices.DeleteFunc(client.ReplicaStarts(r.line(name).Events), func(s client.ReplicaStart) bool { return s.Path == "" })
}

// until waits for something that is asked over HTTP, for at least the limit late: a test that fails
// may take its time, and a busy machine needs it.
func (r *rig) until(limit time.Duration, what string, done func() bool) {
	r.t.Helper()
	tick := time.NewTicker(50 * time.Millisecond) // each question costs both sides something
	defer tick.Stop()
	proctest.Within(r.t, max(limit, late), what, func() bool { <-tick.C; return done() })
}

// value reads a metric's sample by its name with labels.
func (r *rig) value(sample string) float64 {
	r.t.Helper()
	v, err := r.Metric(context.Background(), sample+" ")
	if err != nil {
		r.t.Fatal(err)
	}
	return v
}

// load is clients that send one request after another.
type load struct {
	t    *testing.T
	stop chan struct{}
	wg   sync.WaitGroup

	mu      sync.Mutex
	done    []int // requests that ended, by client
	wrong   []string
	slowest time.Duration
}

// load begins: each of n clients sends its own bodies and checks each answer.
func (r *rig) load(n int, path string, check func(body string, a client.Answer) error, header ...string) *load {
	return r.loadOf(n, path, func(c, i int) string { return fmt.Sprintf("request %d of client %d", i, c) }, check, header...)
}

// loadOf is load with bodies of the caller's choice: body returns that of a client's i-th request.
func (r *rig) loadOf(n int, path string, body func(c, i int) string, check func(body string, a client.Answer) error, header ...string) *load {
	l := &load{t: r.t, stop: make(chan struct{}), done: make([]int, n)}
	for c := range n {
		l.wg.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-l.stop:
					return
				default:
				}
				body := body(c, i)
				a, err := r.trySend(http.MethodPost, path, body, header...)
				if err == nil {
					err = check(body, a)
				}
				l.mu.Lock()
				l.done[c]++
				l.slowest = max(l.slowest, a.Took)
				if err != nil {
					l.wrong = append(l.wrong, body+": "+err.Error())
				}
				l.mu.Unlock()
			}
		})
	}
	return l
}

// turn waits until each client has ended a request that it began after the call, so that no earlier
// request still runs.
func (l *load) turn() {
	l.t.Helper()
	l.mu.Lock()
	from := slices.Clone(l.done)
	l.mu.Unlock()
	proctest.Until(l.t, "each client to have two more answers", func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		for i := range from {
			if l.done[i] < from[i]+2 {
				return false
			}
		}
		return true
	})
}

// end stops the clients and returns how many requests they sent, and what was wrong.
func (l *load) end() (requests int, wrong []string) {
	close(l.stop)
	l.wg.Wait()
	for _, n := range l.done {
		requests += n
	}
	return requests, l.wrong
}
