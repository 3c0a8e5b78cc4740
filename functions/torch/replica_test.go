package torch_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// limit is the maximum life of a replica. A test takes seconds, most of them to import PyTorch, and
// minutes on a machine that is busy with other work.
const limit = 15 * time.Minute

// replica is a process of a stage, and the other end of its socket.
type replica struct {
	t      *testing.T
	cmd    *exec.Cmd
	conn   *wire.Conn
	stderr bytes.Buffer
}

// launch starts a replica of the handler in a folder, from a built image, with a model, and waits
// until it is ready. It also welcomes the replica, so that no replica waits for another.
func launch(t *testing.T, handler, model string) *replica {
	t.Helper()
	python, root := proctest.Torch(t), t.TempDir()
	if err := os.CopyFS(root, os.DirFS("../../templates/python3-stage")); err != nil {
		t.Fatal(err)
	}
	if err := proctest.Copy(filepath.Join(handler, "handler.py"), filepath.Join(root, "handler.py")); err != nil {
		t.Fatal(err)
	}
	ours, theirs := sockets(t)
	r := &replica{t: t, conn: wire.NewConn(ours)}
	// The test's own context ends before its cleanup.
	ctx, kill := context.WithTimeout(context.WithoutCancel(t.Context()), limit)
	r.cmd = exec.CommandContext(ctx, python, "./stage")
	r.cmd.Dir, r.cmd.ExtraFiles, r.cmd.Stderr = root, []*os.File{theirs}, &r.stderr
	r.cmd.Env = []string{wire.EnvStageFD + "=3", wire.EnvModel + "=" + model, wire.EnvThreads + "=1", wire.EnvFunction + "=f.ns", wire.EnvReplica + "=f-1"}
	if err := r.cmd.Start(); err != nil {
		kill()
		t.Fatal(err)
	}
	if err := theirs.Close(); err != nil {
		t.Error(err)
	}
	t.Cleanup(func() {
		defer kill()
		_ = ours.Close() // the replica ends if the other end is closed
		if err := r.cmd.Wait(); err != nil && !t.Failed() {
			t.Errorf("%s: %v\n%s", handler, err, r.stderr.String())
		}
	})
	return r.begin()
}

// sockets returns both ends of a stage socket. Reading from ours fails after the limit.
func sockets(t *testing.T) (*net.UnixConn, *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fds[0]), "stage socket")
	conn, err := net.FileConn(file)
	if err := errors.Join(err, file.Close()); err != nil {
		t.Fatal(err)
	}
	ours := conn.(*net.UnixConn)
	if err := ours.SetDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	return ours, os.NewFile(uintptr(fds[1]), "stage socket")
}

// begin waits until the replica is ready.
func (r *replica) begin() *replica {
	r.t.Helper()
	hello, err := wire.DecodeHello(r.read(wire.FrameHello).Payload)
	if err != nil {
		r.t.Fatal(err)
	}
	version, err := wire.Negotiate(hello)
	if err != nil {
		r.t.Fatal(err)
	}
	r.send(wire.Frame{Type: wire.FrameWelcome, Payload: wire.Welcome{Version: version}.Append(nil)})
	return r
}

func (r *replica) send(f wire.Frame) {
	r.t.Helper()
	if err := r.conn.Write(f); err != nil {
		r.t.Fatalf("%v; stderr:\n%s", err, r.ended())
	}
}

// read returns the next frame and checks its type.
func (r *replica) read(want wire.FrameType) wire.Frame {
	r.t.Helper()
	f, err := r.conn.Read()
	if err != nil || f.Type != want {
		r.t.Fatalf("frame %v %q, %v, want %v; stderr:\n%s", f.Type, f.Payload, err, want, r.ended())
	}
	return f
}

// ended kills the replica, which may hang, and returns its whole stderr.
func (r *replica) ended() string {
	_ = r.cmd.Process.Kill()
	_ = r.cmd.Wait()
	return r.stderr.String()
}

// call sends one call per input as a batch, and returns the outputs in order.
func (r *replica) call(inputs ...tensor.Activation) []tensor.Activation {
	r.t.Helper()
	var batch wire.Batch
	var files []*os.File
	for i, in := range inputs {
		in, more, err := wire.Attach(in, len(files), nil)
		if err != nil {
			r.t.Fatal(err)
		}
		files = append(files, more...)
		batch.Calls = append(batch.Calls, wire.Call{Key: task.Key{Request: "r", Task: uint32(i), Attempt: 1}, Input: tensor.Input{{Items: in}}})
	}
	r.send(wire.Frame{Type: wire.FrameBatch, Batch: 1, Payload: batch.Append(nil), Files: files})
	closeAll(files)
	out := make([]tensor.Activation, len(inputs))
	for range inputs {
		f := r.read(wire.FrameResult)
		m, err := wire.DecodeResult(f.Payload)
		if err == nil {
			out[m.Index], err = wire.Detach(m.Output, f.Files)
		}
		if err != nil {
			r.t.Fatal(err)
		}
		closeAll(f.Files)
	}
	return out
}

// anonymous returns the size of the replica's memory that belongs to no file, in bytes.
func (r *replica) anonymous() int64 {
	r.t.Helper()
	b, err := os.ReadFile("/proc/" + strconv.Itoa(r.cmd.Process.Pid) + "/status")
	if err != nil {
		r.t.Fatal(err)
	}
	found := regexp.MustCompile(`RssAnon:\s*(\d+) kB`).FindSubmatch(b)
	if found == nil {
		r.t.Skip("this kernel does not report RssAnon")
	}
	kb, err := strconv.ParseInt(string(found[1]), 10, 64)
	if err != nil {
		r.t.Fatal(err)
	}
	return kb << 10
}

func closeAll[C io.Closer](files []C) {
	for _, f := range files {
		_ = f.Close()
	}
}
