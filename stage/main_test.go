package stage

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestLimitsComeFromHooksAndEnvironment(t *testing.T) {
	if s, b, err := limits(Hooks{}, ""); s != 1 || b != 1 || err != nil {
		t.Errorf("defaults: %d slots, batches of %d, %v", s, b, err)
	}
	if s, _, err := limits(Hooks{Slots: 3}, "64"); s != 64 || err != nil {
		t.Errorf("max_inflight=64: %d slots, %v", s, err)
	}
	if s, _, err := limits(Hooks{Slots: 3}, "0"); s != 3 || err != nil {
		t.Errorf("max_inflight=0: %d slots, %v", s, err)
	}
	for _, bad := range []string{"x", "10001", "-1"} {
		if _, _, err := limits(Hooks{}, bad); err == nil || !strings.Contains(err.Error(), "max_inflight") {
			t.Errorf("max_inflight=%s: %v", bad, err)
		}
	}
}

func TestStartByHandIsRefused(t *testing.T) {
	if os.Getenv(wire.EnvStageFD) != "" {
		t.Skip("this test process has a stage socket")
	}
	if _, err := stageSocket(); !errors.Is(err, errByHand) {
		t.Errorf("got %v", err)
	}
	t.Setenv(wire.EnvStageFD, "two")
	if _, err := stageSocket(); err == nil || !strings.Contains(err.Error(), "want a descriptor") {
		t.Errorf("got %v", err)
	}
}

// programs returns the stages that this test binary can run as.
func programs() map[string]Hooks {
	echo := Each(func(c *Call) (tensor.Activation, error) { return c.Items(), nil })
	return map[string]Hooks{
		"echo": {Infer: echo, MaxBatch: 3},
		"name": {Infer: Each(func(*Call) (tensor.Activation, error) {
			return tensor.Activation{{Bytes: []byte(os.Getenv("greeting"))}}, nil
		})},
		"unplaced": {Infer: echo, Place: func(context.Context, *Replica) error { return errors.New("no device of 3 GiB, want one") }},
		"crowded": {Infer: echo, Place: func(context.Context, *Replica) error {
			return OutOfMemory(errors.New("want 2 GiB, 1 GiB of 40 GiB free"))
		}},
		"hookless": {},
		"patient":  {Infer: Each(func(c *Call) (tensor.Activation, error) { <-c.Context().Done(); return nil, c.Context().Err() })},
	}
}

// replica is a stage that runs in a separate process.
type replica struct {
	*dispatcher
	cmd    *exec.Cmd
	stderr bytes.Buffer
}

func start(t *testing.T, program string, env ...string) *replica {
	t.Helper()
	x, y := ends(t)
	theirs, err := y.(interface{ File() (*os.File, error) }).File()
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	_ = y.Close()
	r := &replica{dispatcher: &dispatcher{t: t, conn: wire.NewConn(x)}, cmd: exec.CommandContext(t.Context(), os.Args[0])}
	r.cmd.Env = append(os.Environ(), "STAGE_TEST_PROGRAM="+program, wire.EnvStageFD+"=3", wire.EnvFunction+"=f.ns", wire.EnvReplica+"=f-1", "GORACE=atexit_sleep_ms=0")
	r.cmd.Env = append(r.cmd.Env, env...)
	r.cmd.ExtraFiles, r.cmd.Stderr = []*os.File{theirs}, &r.stderr
	if err := r.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return r
}

// exits waits until the process has ended, and checks its exit status and stderr.
func (r *replica) exits(code int, message string) {
	r.t.Helper()
	kill := time.AfterFunc(time.Minute, func() { _ = r.cmd.Process.Kill() })
	defer kill.Stop()
	_ = r.cmd.Wait() // the state says how it ended
	if got := r.cmd.ProcessState.ExitCode(); got != code || !strings.Contains(r.stderr.String(), message) {
		r.t.Errorf("ended with %v and %q, want code %d and %q", r.cmd.ProcessState, r.stderr.String(), code, message)
	}
}

func TestStageServesAsAProcess(t *testing.T) {
	r := start(t, "name", "greeting=hello", "max_inflight=5")
	hello, err := wire.DecodeHello(r.read(wire.FrameHello).Payload)
	if err != nil || hello.Function != "f.ns" || hello.Replica != "f-1" || hello.Slots != 5 || hello.MaxBatch != 1 || hello.PID != r.cmd.Process.Pid {
		t.Errorf("hello %+v, %v", hello, err)
	}
	r.send(wire.FrameWelcome, 0, welcome.Append(nil))
	r.batch(1, time.Time{}, "x")
	if m := r.result(); string(m.Output[0].Bytes) != "hello" {
		t.Errorf("answer %q", m.Output[0].Bytes)
	}
	r.send(wire.FrameDrain, 0, nil)
	r.exits(0, "")
}

func TestAStageEndsWithItsDispatcher(t *testing.T) {
	r := start(t, "patient")
	r.read(wire.FrameHello)
	r.send(wire.FrameWelcome, 0, welcome.Append(nil))
	r.batch(1, time.Time{}, "x")
	_ = r.conn.Close()
	r.exits(0, "")
}

// TestExecTimeoutBoundsACall checks that the environment bounds a call even if its request has no
// deadline, and that the earlier of the two bounds counts.
func TestExecTimeoutBoundsACall(t *testing.T) {
	r := start(t, "patient", "exec_timeout=50ms")
	r.read(wire.FrameHello)
	r.send(wire.FrameWelcome, 0, welcome.Append(nil))
	r.batch(1, time.Time{}, "x")
	r.failure(task.Expired, "it ran for longer than exec_timeout, 50ms")
	r.batch(2, time.Now().Add(time.Hour), "x")
	r.failure(task.Expired, "exec_timeout")
	r.batch(3, time.Now().Add(time.Millisecond), "x")
	r.failure(task.Expired, context.DeadlineExceeded.Error())
	r.send(wire.FrameDrain, 0, nil)
	r.exits(0, "")
	start(t, "echo", "exec_timeout=soon").exits(1, `exec_timeout="soon", want seconds or a duration`)
	for value, want := range map[string]time.Duration{"": 0, "0": 0, "7": 7 * time.Second, "1m30s": 90 * time.Second} {
		if d, err := Duration("exec_timeout", value); d != want || err != nil {
			t.Errorf("exec_timeout=%s: %v, %v", value, d, err)
		}
	}
}

func TestAStageEndsOnSIGTERM(t *testing.T) {
	r := start(t, "patient", "max_inflight=2")
	r.read(wire.FrameHello)
	r.send(wire.FrameWelcome, 0, welcome.Append(nil))
	r.batch(1, time.Time{}, "x")
	r.batch(2, time.Time{}, "x")
	r.send(wire.FrameCancel, 2, wire.Cancel{}.Append(nil))
	r.failure(task.Canceled, "canceled") // so that the first batch has started
	if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	r.read(wire.FrameCredit)
	r.send(wire.FrameCancel, 1, wire.Cancel{}.Append(nil))
	r.failure(task.Canceled, "canceled")
	r.exits(0, "")
}

func TestFailedStartNamesItsCause(t *testing.T) {
	start(t, "unplaced").exits(1, "stage: place: no device of 3 GiB, want one\n")
	start(t, "crowded", "CUDA_VISIBLE_DEVICES=GPU-1").exits(1, "stage: place: out of memory on device GPU-1: want 2 GiB, 1 GiB of 40 GiB free\n")
	start(t, "hookless").exits(1, "Hooks.Infer is nil")
	start(t, "echo", "max_inflight=none").exits(1, `max_inflight="none"`)
	start(t, "echo", wire.EnvStageFD+"=77").exits(1, "stage socket 77")
	start(t, "echo", wire.EnvStageFD+"=").exits(2, "started without a stage socket")
	start(t, "echo", wire.EnvModel+"=none.onnx").exits(1, "stage:")
	r := start(t, "echo")
	r.read(wire.FrameHello)
	r.send(wire.FrameWelcome, 0, wire.Welcome{Version: 9}.Append(nil))
	r.exits(1, "welcome to version 9 of the stage protocol, want 1 to 2")
}
