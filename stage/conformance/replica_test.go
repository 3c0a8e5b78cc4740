package conformance

import (
	"bytes"
	"cmp"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// patience bounds every wait of these tests.
const patience = time.Minute

var (
	welcome = wire.Welcome{Version: wire.Version, Credit: 1 << 20}
	never   time.Time
)

// sdk is a way to start the test stage of one language.
type sdk struct {
	name    string
	command func(t testing.TB) *exec.Cmd
}

// each runs a test against every SDK, and against Python's SDK in a worker.
func each(t *testing.T, test func(t *testing.T, s sdk)) {
	eachProcess(t, test)
	t.Run("worker", func(t *testing.T) { test(t, sdk{"worker", pythonWorker}) })
}

// eachProcess runs a test against every SDK. It is for tests that would not differ in a worker.
func eachProcess(t *testing.T, test func(t *testing.T, s sdk)) {
	for _, s := range []sdk{{"go", goStage}, {"python", pythonStage}} {
		t.Run(s.name, func(t *testing.T) { test(t, s) })
	}
}

func goStage(t testing.TB) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "GORACE=atexit_sleep_ms=0")
	return cmd
}

// image makes the root folder of a Python stage with this handler.
func image(t testing.TB, handler string) string {
	t.Helper()
	template, err := filepath.Abs("../../templates/python3-stage")
	if err != nil {
		t.Fatal(err)
	}
	root := t.TempDir()
	code, err := os.ReadFile(handler)
	if err == nil {
		err = os.WriteFile(filepath.Join(root, "handler.py"), code, 0o600)
	}
	err = errors.Join(err, proctest.Copy(filepath.Join(template, "stage"), filepath.Join(root, "stage")),
		os.Symlink(filepath.Join(template, "stagecoach"), filepath.Join(root, "stagecoach")))
	if err != nil {
		t.Fatal(err)
	}
	return root
}

func pythonStage(t testing.TB) *exec.Cmd {
	return pythonHandler(t, "testdata/handler.py")
}

// pythonWorker starts the Python stage in a worker.
func pythonWorker(t testing.TB) *exec.Cmd {
	t.Helper()
	script, err := filepath.Abs("testdata/in_worker.py")
	if err != nil {
		t.Fatal(err)
	}
	cmd := pythonStage(t)
	cmd.Args[1] = script
	return cmd
}

func pythonHandler(t testing.TB, handler string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), proctest.Python(t), "./stage")
	cmd.Dir, cmd.Env = image(t, handler), os.Environ()
	return cmd
}

// replica is a stage as its dispatcher sees it.
type replica struct {
	t      testing.TB
	conn   *wire.Conn
	raw    *net.UnixConn
	cmd    *exec.Cmd
	ended  chan error
	stderr output
	stdout output
}

// output collects the output of a process.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// launch starts a replica and sends nothing to it.
func (s sdk) launch(t testing.TB, program string, env ...string) *replica {
	t.Helper()
	return launch(t, s.command(t), append([]string{envProgram + "=" + program}, env...)...)
}

func launch(t testing.TB, cmd *exec.Cmd, env ...string) *replica {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	defer ours.Close()
	defer theirs.Close()
	c, err := net.FileConn(ours)
	if err != nil {
		t.Fatal(err)
	}
	r := &replica{t: t, conn: wire.NewConn(c.(*net.UnixConn)), raw: c.(*net.UnixConn), cmd: cmd, ended: make(chan error, 1)}
	r.cmd.Env = append(r.cmd.Env, wire.EnvStageFD+"=3", wire.EnvFunction+"=f.ns", wire.EnvReplica+"=f-1")
	r.cmd.Env = append(r.cmd.Env, env...)
	r.cmd.ExtraFiles, r.cmd.Stdout, r.cmd.Stderr = []*os.File{theirs}, &r.stdout, &r.stderr
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waited := make(chan struct{})
	go func() {
		defer close(waited)
		r.ended <- r.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill() // fails if it has ended
		<-waited
		_ = r.conn.Close()
		r.conn.Release()
	})
	return r
}

// begin starts a replica and welcomes it.
func (s sdk) begin(t testing.TB, program string, env ...string) *replica {
	t.Helper()
	return s.launch(t, program, env...).greet(welcome)
}

func (r *replica) greet(w wire.Welcome) *replica {
	r.t.Helper()
	r.hello()
	r.send(wire.FrameWelcome, 0, w.Append(nil))
	return r
}

func (r *replica) hello() wire.Hello {
	r.t.Helper()
	h, err := wire.DecodeHello(r.read(wire.FrameHello).Payload)
	if err != nil {
		r.t.Fatal(err)
	}
	return h
}

func (r *replica) send(kind wire.FrameType, batch uint64, payload []byte) {
	r.t.Helper()
	if err := r.conn.Write(wire.Frame{Type: kind, Batch: batch, Payload: payload}); err != nil {
		r.t.Fatal(err)
	}
}

func (r *replica) cancel(batch uint64, index int) {
	r.t.Helper()
	r.send(wire.FrameCancel, batch, wire.Cancel{Index: index}.Append(nil))
}

// call returns a call with one item of text.
func call(i int, deadline time.Time, text string) wire.Call {
	return wire.Call{
		Key: task.Key{Request: "r", Task: uint32(i), Attempt: 1}, Deadline: deadline,
		Input: tensor.Input{{Items: tensor.Activation{{ContentType: "text/plain", Bytes: []byte(text)}}}},
	}
}

func batch(deadline time.Time, texts ...string) []byte {
	var b wire.Batch
	for i, s := range texts {
		b.Calls = append(b.Calls, call(i, deadline, s))
	}
	return b.Append(nil)
}

func (r *replica) batch(id uint64, deadline time.Time, texts ...string) {
	r.t.Helper()
	r.send(wire.FrameBatch, id, batch(deadline, texts...))
}

func (r *replica) read(want wire.FrameType) wire.Frame {
	r.t.Helper()
	if err := r.conn.SetReadDeadline(time.Now().Add(patience)); err != nil {
		r.t.Fatal(err)
	}
	f, err := r.conn.Read()
	if err != nil {
		r.t.Fatalf("reading a frame %v: %v; stderr %s", want, err, r.stderr.String())
	}
	if f.Type != want {
		r.t.Fatalf("frame %v (%.200q), want %v", f.Type, f.Payload, want)
	}
	return f
}

// failure reads an error with this code and text. It returns the batch and the call that the error
// belongs to.
func (r *replica) failure(code task.Code, text string) (id uint64, index int) {
	r.t.Helper()
	f := r.read(wire.FrameError)
	m, err := wire.DecodeError(f.Payload)
	if err != nil || m.Code != code || !strings.Contains(m.Message, text) {
		r.t.Errorf("error %+v, %v, want code %d and %q", m, err, code, text)
	}
	return f.Batch, m.Index
}

func (r *replica) result() wire.Result {
	r.t.Helper()
	f := r.read(wire.FrameResult)
	m, err := wire.DecodeResult(f.Payload)
	if err == nil {
		m.Output, err = wire.Detach(m.Output, f.Files)
	}
	for _, file := range f.Files {
		err = errors.Join(err, file.Close())
	}
	if err != nil {
		r.t.Fatal(err)
	}
	return m
}

// text reads a result with one item of bytes.
func (r *replica) text() string {
	r.t.Helper()
	m := r.result()
	if len(m.Output) != 1 || m.Output[0].Tensors != nil {
		r.t.Fatalf("result %+v, want one item of bytes", m)
	}
	return string(m.Output[0].Bytes)
}

// ask runs a call with this text and returns the answer.
func (r *replica) ask(id uint64, text string) string {
	r.t.Helper()
	r.batch(id, never, text)
	return r.text()
}

// exits waits until the process has ended, and checks its exit status and the reason on stderr.
func (r *replica) exits(code int, message string) {
	r.t.Helper()
	select {
	case err := <-r.ended:
		r.ended <- err
	case <-time.After(patience):
		r.t.Fatalf("the replica does not end; stderr %s", r.stderr.String())
	}
	if got := r.cmd.ProcessState.ExitCode(); got != code || !strings.Contains(r.stderr.String(), message) {
		r.t.Errorf("ended with %v and %q, want code %d and %q", r.cmd.ProcessState, r.stderr.String(), code, cmp.Or(message, "anything"))
	}
}

// drained drains the replica and checks that it ends.
func (r *replica) drained() {
	r.t.Helper()
	r.send(wire.FrameDrain, 0, nil)
	r.exits(0, "")
}
