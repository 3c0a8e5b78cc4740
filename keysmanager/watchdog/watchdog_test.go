package watchdog

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

func TestMain(m *testing.M) {
	// A watchdog that has started its program and waits.
	if os.Getenv("WATCHDOG_TEST") == "watchdog" {
		_, err := startChild(context.Background(), sandbox.NewSpawner(), shell(modeHTTP, "sleep 60 & echo $$ $!; wait"))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		select {}
	}
	switch os.Getenv("WATCHDOG_TEST") {
	case "program":
		serveProgram()
	case "program's watchdog":
		watchdogAt()
	}
	goleak.VerifyTestMain(m)
}

// shell returns the configuration of a function that is a script.
func shell(mode, script string) *config {
	return &config{mode: mode, contentType: "text/plain", image: sandbox.Image{Root: "/"}, process: []string{"sh", "-c", script}, env: map[string]string{}}
}

// soon bounds events that are expected at once.
const soon = time.Minute

// TestProgramIsReadyAfterItsProbe checks that a program is ready if its answer to a probe says so,
// or if the program answers but does not know the probe's path.
func TestProgramIsReadyAfterItsProbe(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		path string
		// statuses per path, in order of the answers; the last one repeats.
		statuses map[string][]int
		asked    int    // lower bound
		want     string // part of the error; empty: ready
	}{
		"at once":             {"", map[string][]int{"/_/ready": {200}}, 1, ""},
		"loading":             {"", map[string][]int{"/_/ready": {503, 429, 503, 204}}, 4, ""},
		"health alone":        {"", map[string][]int{"/_/ready": {404}, "/_/health": {503, 200}}, 4, ""},
		"neither":             {"", map[string][]int{"/_/ready": {404}, "/_/health": {405}}, 2, ""},
		"redirected":          {"", map[string][]int{"/_/ready": {302}, "/_/health": {302}}, 2, ""},
		"never":               {"", map[string][]int{"/_/ready": {503}}, 2, "not ready in time"},
		"a path":              {"/up", map[string][]int{"/up": {404, 500, 200}}, 3, ""},
		"a path that is none": {"/up", map[string][]int{"/up": {404}}, 2, "/up answered 404, want 2xx"},
		"a path elsewhere":    {"/up", map[string][]int{"/up": {302}}, 2, "/up answered 302, want 2xx"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), soon)
			defer cancel()
			var asked atomic.Int64
			calls := map[string]int{} // one at a time
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if asked.Add(1) > int64(tc.asked) && tc.want != "" {
					cancel()
				}
				list := tc.statuses[r.URL.Path]
				status := list[min(calls[r.URL.Path], len(list)-1)]
				calls[r.URL.Path]++
				w.Header().Set("Location", "/elsewhere")
				w.WriteHeader(status)
			}))
			defer s.Close()
			err := at(t, s.URL).wait(ctx, tc.path)
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("%v, want %q", err, tc.want)
			}
			if n := asked.Load(); n < int64(tc.asked) {
				t.Errorf("asked %d times, want %d", n, tc.asked)
			}
		})
	}
}

// at returns a child that stands for a program started by somebody else.
func at(t *testing.T, where string) *child {
	t.Helper()
	u, err := url.Parse(where)
	if err != nil {
		t.Fatal(err)
	}
	return &child{at: *u, root: os.Getpid(), gone: make(chan struct{})}
}

// TestProgramIsGivenUpAfterThreeFailures checks that a program is given up after three consecutive
// failures, and not before.
func TestProgramIsGivenUpAfterThreeFailures(t *testing.T) {
	t.Parallel()
	answers := []int{500, 500, 200, 404, 503, 204, 500, 500, 500}
	asked := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(answers[asked])
		asked++
	}))
	defer s.Close()
	err := at(t, s.URL).check(t.Context(), "/up", 0, time.Millisecond)
	if err == nil || !strings.Contains(err.Error(), "bad 3 times in a row: /up answered 500, want 2xx") || asked != len(answers) {
		t.Errorf("after %d looks: %v", asked, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := at(t, s.URL).check(ctx, "/up", time.Hour, time.Hour); err != nil {
		t.Errorf("%v", err)
	}
}

// TestSlowProgramIsNotReady checks two programs that are not ready: one accepts connections and
// does not answer, and the other does not listen yet.
func TestSlowProgramIsNotReady(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		if c, err := l.Accept(); err == nil {
			cancel()
			_, _ = io.Copy(io.Discard, c) // until the probe is given up
			_ = c.Close()
		}
	}()
	if err := at(t, "http://"+l.Addr().String()).wait(ctx, ""); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	_ = l.Close()
	// No event says that a dial was refused. Without processor time, the limit may come before it.
	proctest.Until(t, "a refused dial", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		err := at(t, "http://"+l.Addr().String()).wait(ctx, "")
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		return strings.Contains(fmt.Sprint(err), "refused")
	})
}

// TestProgramThatEndsIsNotWaitedFor checks that a program that ends before it is ready is not
// waited for.
func TestProgramThatEndsIsNotWaitedFor(t *testing.T) {
	t.Parallel()
	s := sandbox.NewSpawner()
	defer s.Close()
	for script, want := range map[string]string{"exit 3": "exit status 3", "kill -9 $$": "killed by SIGKILL"} {
		p, err := startChild(t.Context(), s, shell(modeHTTP, script))
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		if err := p.wait(ctx, ""); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", script, err, want)
		}
		cancel()
	}
}

// TestReplicaRefusesTheProgramOfAnother checks that a second replica does not use the first one's
// program.
func TestReplicaRefusesTheProgramOfAnother(t *testing.T) {
	t.Parallel()
	first := httptest.NewServer(http.NotFoundHandler())
	defer first.Close()
	s := sandbox.NewSpawner()
	defer s.Close()
	c := shell(modeHTTP, "sleep 60")
	c.upstream = &at(t, first.URL).at
	if _, err := startChild(t.Context(), s, c); err == nil || !strings.Contains(err.Error(), "is taken by process ") {
		t.Errorf("%v", err)
	}
}

// TestStopKillsAProgramThatIgnoresSIGTERM checks that a program is asked to end, and killed if it
// does not.
func TestStopKillsAProgramThatIgnoresSIGTERM(t *testing.T) {
	t.Parallel()
	s := sandbox.NewSpawner()
	defer s.Close()
	for script, want := range map[string]string{
		"trap 'exit 7' TERM; echo up >&9; while :; do sleep 0.01; done": "exit status 7",
		"trap '' TERM; echo up >&9; while :; do sleep 0.01; done":       "killed by SIGKILL",
	} {
		said, say, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		c := shell(modeHTTP, strings.ReplaceAll(script, ">&9", fmt.Sprintf("> /proc/%d/fd/%d", os.Getpid(), say.Fd())))
		p, err := startChild(t.Context(), s, c)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := said.Read(make([]byte, 3)); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), soon)
		if strings.Contains(want, "SIGKILL") {
			cancel() // stop must not wait
		}
		p.stop(ctx)
		cancel()
		if got := p.end(); !strings.Contains(got, want) {
			t.Errorf("%s: %s, want %s", script, got, want)
		}
		_, _ = said.Close(), say.Close()
	}
}

// TestProgramEndsWithItsWatchdog checks that everything that a program has started ends with its
// watchdog, even if the watchdog is killed.
func TestProgramEndsWithItsWatchdog(t *testing.T) {
	t.Parallel()
	s := sandbox.NewSpawner() // as a KeysManager has one
	defer s.Close()
	out, theirs, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	cmd, err := s.Start(t.Context(), sandbox.Command{Dir: "/", Argv: []string{os.Args[0]}, Env: map[string]string{"WATCHDOG_TEST": "watchdog"}, Stdout: theirs, Stderr: os.Stderr})
	_ = theirs.Close()
	if err != nil {
		t.Fatal(err)
	}
	var program, started int
	if _, err := fmt.Fscan(out, &program, &started); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(cmd.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if status := cmd.Wait(); status.Signal() != unix.SIGKILL {
		t.Errorf("ended with %v", status)
	}
	proctest.Gone(t, program)
	proctest.Gone(t, started)
}

// forkServer serves a function that is a script.
func forkServer(t *testing.T, c *config) *httptest.Server {
	t.Helper()
	spawner := sandbox.NewSpawner()
	t.Cleanup(spawner.Close)
	s := httptest.NewServer(bounded(c.exec, &forker{c: c, runtime: spawner, log: slog.New(slog.DiscardHandler)}))
	t.Cleanup(s.Close)
	return s
}

// TestEachRequestHasItsProcess checks the modes with one process per request, whose output is sent
// as it comes or after success.
func TestEachRequestHasItsProcess(t *testing.T) {
	t.Parallel()
	big := strings.Repeat("0123456789abcdef", 1<<19) // 8 MiB
	for name, tc := range map[string]struct {
		mode, script, body string
		status             int
		want               string // the whole answer; for a failure, a part of it
		broken             bool
	}{
		"cat":                    {modeStreaming, "cat", "hello", 200, "hello", false},
		"large":                  {modeStreaming, "cat", big, 200, big, false},
		"large, kept":            {modeSerializing, "cat", big, 200, big, false},
		"nothing":                {modeSerializing, "cat >/dev/null", "x", 200, "", false},
		"input not read":         {modeStreaming, "echo done", big, 200, "done\n", false},
		"exit status":            {modeStreaming, "echo first >&2; echo last >&2; exit 3", "", 500, "exit status 3: last", false},
		"exit status, kept":      {modeSerializing, "echo half; echo why >&2; exit 3", "", 500, "exit status 3: why", false},
		"broken":                 {modeStreaming, "echo half; exit 3", "", 200, "half\n", true},
		"killed":                 {modeSerializing, "kill -9 $$", "", 500, "killed by SIGKILL", false},
		"too much":               {modeSerializing, "head -c 70000000 /dev/zero", "", 500, "want mode=streaming", false},
		"left behind":            {modeSerializing, "sleep 60 >/dev/null 2>&1 & echo ok", "", 200, "ok\n", false},
		"left behind, with pipe": {modeStreaming, "sleep 60 & echo ok", "", 200, "ok\n", false},
		"environment":            {modeStreaming, `echo "$Http_Method $Http_Path $Http_Query $Http_X_A"`, "", 200, "POST /a b q=1 v\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := shell(tc.mode, tc.script)
			s := forkServer(t, c)
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.URL+"/a%20b?q=1", strings.NewReader(tc.body))
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("X-A", "v")
			resp, err := s.Client().Do(req)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			same := string(b) == tc.want || tc.status != 200 && bytes.Contains(b, []byte(tc.want))
			if resp.StatusCode != tc.status || !same || (err != nil) != tc.broken {
				t.Errorf("%d, %d bytes: %.200q, %v", resp.StatusCode, len(b), b, err)
			}
		})
	}
}

// TestExecTimeoutKillsTheProcessGroup checks that a process that takes too long is killed, with
// everything that it has started.
func TestExecTimeoutKillsTheProcessGroup(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{modeStreaming, modeSerializing} {
		file := t.TempDir() + "/pid"
		c := shell(mode, "sleep 60 & echo $! > "+file+"; wait")
		c.exec = 3 * time.Second // enough to write the file
		s := forkServer(t, c)
		resp, err := s.Client().Post(s.URL, "", nil)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		if resp.StatusCode != http.StatusGatewayTimeout || !bytes.Contains(b, []byte("exec_timeout, 3s")) {
			t.Errorf("%s: %d %s", mode, resp.StatusCode, b)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
		if err != nil {
			t.Fatal(err)
		}
		proctest.Gone(t, pid)
	}
}

// TestProcessEndsWithItsClient checks that a process is killed when its client leaves.
func TestProcessEndsWithItsClient(t *testing.T) {
	t.Parallel()
	s := forkServer(t, shell(modeStreaming, "echo $$; exec sleep 60"))
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := s.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	var pid int
	if _, err := fmt.Fscan(resp.Body, &pid); err != nil {
		t.Fatal(err)
	}
	leave()
	resp.Body.Close()
	proctest.Gone(t, pid)
}

// TestStartsEndWithTheirRequest has a Runtime that waits, as containers wait for containerd.
func TestStartsEndWithTheirRequest(t *testing.T) {
	t.Parallel()
	c := shell(modeStreaming, "echo done")
	waits := &stalled{began: make(chan struct{}, 2), ended: make(chan error, 2)}
	f := &forker{c: c, runtime: waits, log: slog.New(slog.DiscardHandler)}

	w := httptest.NewRecorder()
	bounded(time.Second, f).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil))
	if text := w.Body.String(); w.Code != http.StatusGatewayTimeout || !strings.Contains(text, "exec_timeout") {
		t.Errorf("%d %s, want 504 and its exec_timeout", w.Code, text)
	}
	if err := <-waits.ended; !errors.As(err, new(timeoutError)) {
		t.Errorf("the start ended for %v, want its exec_timeout", err)
	}

	<-waits.began
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan struct{})
	go func() { // the test waits for it
		defer close(served)
		f.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(ctx, http.MethodPost, "/", nil))
	}()
	<-waits.began
	cancel()
	<-served
	if err := <-waits.ended; !errors.Is(err, context.Canceled) {
		t.Errorf("the start ended for %v, want that the client has gone", err)
	}
}

// stalled is a Runtime whose starts wait until their contexts end.
type stalled struct {
	sandbox.Runtime
	began chan struct{}
	ended chan error
}

func (w *stalled) Start(ctx context.Context, _ sandbox.Command) (sandbox.Process, error) {
	w.began <- struct{}{}
	<-ctx.Done()
	w.ended <- context.Cause(ctx)
	return nil, context.Cause(ctx)
}

func TestProgramsGetOneCallAtATime(t *testing.T) {
	w := &watchdog{c: &config{slots: 7}}
	if h := w.hooks(); h.MaxBatch != 1 || h.Slots != 7 {
		t.Errorf("batches of %d in %d slots, want 1 in 7", h.MaxBatch, h.Slots)
	}
}
