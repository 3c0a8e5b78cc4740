package zygote_test

import (
	"bytes"
	"encoding/gob"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/wire"
)

const patience = 30 * time.Second // for what takes milliseconds when nothing is wrong

// keeper is the manager's end of a zygote.
type keeper struct {
	t      *testing.T
	cmd    *exec.Cmd
	socket *net.UnixConn
	stderr *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// pair makes a socket pair of which one end is a connection and the other a file to pass on.
func pair(t *testing.T, kind int) (*net.UnixConn, *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	here, there := os.NewFile(uintptr(fds[0]), "here"), os.NewFile(uintptr(fds[1]), "there")
	c, err := net.FileConn(here)
	here.Close()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); there.Close() })
	return c.(*net.UnixConn), there
}

// start runs this test binary as a zygote.
func start(t *testing.T, env ...string) *keeper {
	t.Helper()
	socket, there := pair(t, unix.SOCK_SEQPACKET)
	k := &keeper{t: t, socket: socket, stderr: &lockedBuffer{}}
	k.cmd = exec.Command(os.Args[0], "-test.run=^$")
	k.cmd.Env = append([]string{"BEFORE=1", wire.EnvZygoteFD + "=3", "AFTER=1", "GOCOVERDIR=" + t.TempDir(), "PATH=" + os.Getenv("PATH")}, env...)
	k.cmd.ExtraFiles = []*os.File{there}
	k.cmd.Stderr = k.stderr
	if err := k.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	there.Close()
	t.Cleanup(func() {
		if k.cmd.ProcessState == nil {
			socket.Close()
			_ = k.cmd.Process.Kill()
			_ = k.cmd.Wait()
		}
		if t.Failed() {
			t.Logf("zygote's stderr:\n%s", k.stderr)
		}
	})
	return k
}

// read returns the zygote's next message.
func (k *keeper) read() wire.Order {
	k.t.Helper()
	b := make([]byte, 4096)
	n, err := k.socket.Read(b)
	if err != nil {
		k.t.Fatalf("read from zygote: %v; stderr: %s", err, k.stderr)
	}
	o, err := wire.DecodeOrder(b[:n])
	if err != nil {
		k.t.Fatal(err)
	}
	return o
}

// want reads the next message and checks its kind.
func (k *keeper) want(kind wire.OrderKind) wire.Order {
	k.t.Helper()
	o := k.read()
	if o.Kind != kind {
		k.t.Fatalf("message %+v, want kind %c", o, kind)
	}
	return o
}

func (k *keeper) send(message []byte, files ...*os.File) {
	k.t.Helper()
	say(k.t, k.socket, message, files...)
}

// say sends a message with descriptors.
func say(t *testing.T, to *net.UnixConn, message []byte, files ...*os.File) {
	t.Helper()
	var fds []int
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	if _, _, err := to.WriteMsgUnix(message, unix.UnixRights(fds...), nil); err != nil {
		t.Fatal(err)
	}
}

// replica is a child and the test's end of its stage socket.
type replica struct {
	t              *testing.T
	pid            int
	socket         *net.UnixConn
	ask            *gob.Encoder
	answers        *gob.Decoder
	stdout, stderr *os.File // what it writes, to be read from the start
}

// fork orders a child, waits until the zygote has said so, and begins it.
func (k *keeper) fork(threads uint16, env ...string) *replica {
	k.t.Helper()
	pid, gate := k.spare()
	socket, there := pair(k.t, unix.SOCK_STREAM)
	r := newReplica(k.t, socket)
	r.pid = pid
	begin := encode(wire.Order{Kind: wire.OrderBegin, Version: wire.OrderVersion, Threads: threads, Env: env})
	say(k.t, gate, begin, there, r.stdout, r.stderr)
	gate.Close()
	there.Close()
	return r
}

// spare orders a child, which waits at its gate.
func (k *keeper) spare() (pid int, gate *net.UnixConn) {
	k.t.Helper()
	gate, theirs := pair(k.t, unix.SOCK_SEQPACKET)
	k.send(encode(wire.Order{Kind: wire.OrderFork, Version: wire.OrderVersion, ID: 77}), theirs)
	theirs.Close()
	o := k.want(wire.ChildForked)
	if o.ID != 77 || o.PID == 0 || o.Nanos == 0 {
		k.t.Fatalf("forked %+v, want id 77, a pid and a time", o)
	}
	return int(o.PID), gate
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

// process starts an ordinary process that opens a model as the options say, with these files as descriptors 4, 5, ….
func process(t *testing.T, o zygote.Options, files ...*os.File) *replica {
	t.Helper()
	socket, there := pair(t, unix.SOCK_STREAM)
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

// do asks a question and returns the answer.
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

// gone waits until the other end of a replica's socket is closed: its process has ended.
func (r *replica) gone() {
	r.t.Helper()
	if n, err := r.socket.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		r.t.Errorf("replica %d: read %d bytes, error %v, want the end of the stream", r.pid, n, err)
	}
}

func encode(o wire.Order) []byte { return wire.AppendOrder(nil, o) }

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
