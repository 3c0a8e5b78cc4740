package zygote_test

import (
	"encoding/gob"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
)

const patience = time.Minute // for steps that normally take milliseconds

// keeper is the manager's side of a zygote.
type keeper struct {
	*proctest.Keeper
	t *testing.T
}

// start runs this test binary as a zygote.
func start(t *testing.T, env ...string) *keeper {
	t.Helper()
	env = append([]string{"AFTER=1", "GOCOVERDIR=" + t.TempDir()}, env...)
	return &keeper{proctest.Keep(t, "", env, os.Args[0], "-test.run=^$"), t}
}

// replica is a child and the test's end of its stage socket.
type replica struct {
	t              *testing.T
	pid            int
	socket         *net.UnixConn
	ask            *gob.Encoder
	answers        *gob.Decoder
	stdout, stderr *os.File // its output, to be read from the start
}

// fork orders a child, waits for the zygote's report, and lets the child begin.
func (k *keeper) fork(threads uint16, env ...string) *replica {
	k.t.Helper()
	pid, gate := k.Fork(77)
	socket, there := proctest.Pair(k.t, unix.SOCK_STREAM)
	r := newReplica(k.t, socket)
	r.pid = pid
	k.Say(gate, proctest.Encode(wire.Order{Kind: wire.OrderBegin, Threads: threads, Env: env}), there, r.stdout, r.stderr)
	gate.Close()
	there.Close()
	return r
}

func newReplica(t *testing.T, socket *net.UnixConn) *replica {
	t.Helper()
	r := &replica{t: t, socket: socket, ask: gob.NewEncoder(socket), answers: gob.NewDecoder(socket)}
	for _, f := range []**os.File{&r.stdout, &r.stderr} {
		var err error
		if *f, err = os.CreateTemp(t.TempDir(), "std"); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { (*f).Close() })
	}
	return r
}

// process starts an ordinary process that opens a model with these options. The files become
// descriptors 4, 5, ….
func process(t *testing.T, o zygote.Options, files ...*os.File) *replica {
	t.Helper()
	socket, there := proctest.Pair(t, unix.SOCK_STREAM)
	r := newReplica(t, socket)
	options, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = []string{openEnv + "=" + string(options), "GOCOVERDIR=" + t.TempDir(), "PATH=" + os.Getenv("PATH")}
	cmd.ExtraFiles, cmd.Stdout, cmd.Stderr = append([]*os.File{there}, files...), r.stdout, r.stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	there.Close()
	r.pid = cmd.Process.Pid
	t.Cleanup(func() { socket.Close(); _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return r
}

// do sends a question and returns the answer.
func (r *replica) do(q question) answer {
	r.t.Helper()
	var a answer
	err := r.ask.Encode(q)
	if err == nil {
		err = r.answers.Decode(&a)
	}
	if err != nil {
		r.t.Fatalf("%s: %v; replica's stderr: %s", q.Do, err, content(r.t, r.stderr))
	}
	return a
}

func content(t *testing.T, f *os.File) string {
	t.Helper()
	b, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// gone waits until the other end of a replica's socket is closed, which means that its process has
// ended.
func (r *replica) gone() {
	r.t.Helper()
	if n, err := r.socket.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		r.t.Errorf("replica %d: read %d bytes, error %v, want the end of the stream", r.pid, n, err)
	}
}

func library(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../../build/ort/libonnxruntime.so.1")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("%v: run make fetch", err)
		}
		t.Skipf("%v: run make fetch", err)
	}
	return path
}
