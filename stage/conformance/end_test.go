package conformance

import (
	"strings"
	"syscall"
	"testing"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// TestADrainingReplicaStillListens drains a replica that runs a call that needs credit, and a call
// that is then canceled.
func TestADrainingReplicaStillListens(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.launch(t, "each").greet(wire.Welcome{Version: wire.Version, Credit: 4})
		r.batch(7, never, "stream")
		r.chunk()
		r.send(wire.FrameDrain, 0, nil)
		r.send(wire.FrameDrain, 0, nil) // a second Drain has no effect
		r.send(wire.FrameCredit, 0, wire.Credit{Amount: 100}.Append(nil))
		if got := r.chunk(); got != "456789" {
			t.Errorf("after the drain came %q", got)
		}
		r.result()
		r.exits(0, "")

		r = s.begin(t, "each")
		r.batch(1, never, "wait")
		r.send(wire.FrameDrain, 0, nil)
		r.cancel(1, wire.CancelAll)
		r.failure(task.Canceled, "cancel")
		r.exits(0, "")
	})
}

func TestReplicaToldToEndFinishesItsCalls(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
			r := s.begin(t, "each", "max_inflight=2")
			r.batch(1, never, "wait")
			r.ask(2, "so the first has come")
			if err := r.cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			if m, err := wire.DecodeCredit(r.read(wire.FrameCredit).Payload); err != nil || m.Amount != 0 {
				t.Errorf("credit %+v, %v, want none", m, err)
			}
			r.batch(2, never, "sent before", "the credit came")
			r.failure(task.ReplicaLost, "told to end")
			if id, i := r.failure(task.ReplicaLost, "told to end"); id != 2 || i != 1 {
				t.Errorf("refused was call %d of batch %d", i, id)
			}
			r.cancel(1, 0)
			r.failure(task.Canceled, "cancel")
			r.exits(0, "")
		}
	})
}

func TestAReplicaToldToEndDoesNotWaitForAWelcome(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.launch(t, "each")
		r.hello()
		if err := r.cmd.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		r.exits(0, "")
	})
}

func TestAReplicaEndsWithItsDispatcher(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		for _, text := range []string{"", "wait", "stream", "flood"} {
			r := s.launch(t, "each").greet(wire.Welcome{Version: wire.Version})
			if text != "" {
				r.batch(1, never, text)
			}
			if text == "flood" {
				r.drip()
			}
			_ = r.conn.Close()
			r.exits(0, "")
		}
		r := s.launch(t, "each")
		r.hello()
		_ = r.conn.Close()
		r.exits(1, "welcome")
	})
}

// drip waits for the first byte from the replica. It leaves that byte and all others unread.
func (r *replica) drip() {
	r.t.Helper()
	raw, err := r.raw.SyscallConn()
	if err == nil {
		var n int
		var e error
		err = raw.Read(func(fd uintptr) bool {
			n, _, e = syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK)
			return e != syscall.EAGAIN
		})
		if n != 1 {
			r.t.Fatalf("%d bytes, %v", n, e)
		}
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// TestReplicaEndsAlthoughNobodyReads plays a dispatcher that reads no answers and then breaks the
// protocol.
func TestReplicaEndsAlthoughNobodyReads(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "each")
		r.batch(1, never, "flood")
		r.drip()
		r.send(wire.FrameHello, 0, nil)
		r.exits(1, "frame Hello")
	})
}

func TestFailedStartNamesItsCause(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		s.launch(t, "unplaced").exits(1, "no device of 3 GiB, want one")
		s.launch(t, "hookless").exits(1, "nfer")
		for env, want := range map[string]string{
			"max_inflight=none":  `max_inflight="none"`,
			"max_inflight=10001": `max_inflight="10001"`,
			"exec_timeout=soon":  `exec_timeout="soon", want seconds or a duration`,
		} {
			s.launch(t, "each", env).exits(1, want)
		}
		for _, version := range []uint8{0, wire.Version + 1} {
			s.launch(t, "each").greet(wire.Welcome{Version: version}).exits(1, "of the stage protocol, want 1 to 2")
		}
		s.launch(t, "each").greet(wire.Welcome{Version: 1}).drained() // an older dispatcher
		r := s.launch(t, "crowded")
		if r.exits(1, "want 3 GiB, 1 GiB is free\n"); strings.Contains(r.stderr.String(), wire.OutOfMemoryOn) {
			t.Errorf("without a device: %q", r.stderr.String())
		}
		if s.name == "worker" { // in a worker, the worker has the device and the descriptors
			return
		}
		s.launch(t, "crowded", "CUDA_VISIBLE_DEVICES=GPU-5f").exits(1, wire.OutOfMemoryOn+"GPU-5f: want 3 GiB, 1 GiB is free\n")
		for fd, want := range map[string]string{
			"two": `STAGECOACH_STAGE_FD="two", want a descriptor`,
			"77":  "stage socket 77",
			"2":   `STAGECOACH_STAGE_FD="2", want a descriptor`,
		} {
			s.launch(t, "each", wire.EnvStageFD+"="+fd).exits(1, want)
		}
		s.launch(t, "each", wire.EnvStageFD+"=").exits(2, "started without a stage socket")
	})
}

func TestBrokenDispatchersEndTheReplica(t *testing.T) {
	stray := func(ref tensor.Ref) []byte {
		return wire.Batch{Calls: []wire.Call{{Input: tensor.Input{{Items: tensor.Activation{{Ref: &ref}}}}}}}.Append(nil)
	}
	for name, tc := range map[string]struct {
		do   func(r *replica)
		want string
	}{
		"garbage":        {func(r *replica) { r.send(wire.FrameBatch, 1, []byte("junk")) }, "batch"},
		"no calls":       {func(r *replica) { r.send(wire.FrameBatch, 1, []byte{0}) }, "no calls, want at least one"},
		"more behind":    {func(r *replica) { r.send(wire.FrameBatch, 1, append(batch(never, "a"), 1)) }, "1 bytes left over"},
		"wrong frame":    {func(r *replica) { r.send(wire.FrameHello, 0, nil) }, "frame Hello, want Batch"},
		"an answer":      {func(r *replica) { r.send(wire.FrameResult, 1, nil) }, "frame Result, want Batch"},
		"welcome again":  {func(r *replica) { r.send(wire.FrameWelcome, 0, welcome.Append(nil)) }, "frame Welcome"},
		"too many":       {func(r *replica) { r.batch(1, never, "wait"); r.batch(2, never, "wait") }, "batch 2 while 1 run, want at most 1"},
		"large batch":    {func(r *replica) { r.batch(1, never, "a", "b", "c", "d", "e") }, "batch 1 of 5 calls, want at most 4"},
		"same batch":     {func(r *replica) { r.batch(1, never, "wait"); r.batch(1, never, "wait") }, "batch 1"},
		"file not there": {func(r *replica) { r.send(wire.FrameBatch, 1, stray(tensor.Ref{Owner: "fd:", Blob: "0", Size: 1})) }, "item 0: reference"},
		"blob":           {func(r *replica) { r.send(wire.FrameBatch, 1, stray(tensor.Ref{Owner: "r", Blob: "0"})) }, "item 0: reference"},
		"2 GiB": {func(r *replica) {
			r.send(wire.FrameBatch, 1, stray(tensor.Ref{Owner: "fd:", Blob: "0", Size: 2 << 30}))
		}, "2147483648 bytes in a file"},
		"bad cancel":     {func(r *replica) { r.send(wire.FrameCancel, 1, nil) }, "cancel:"},
		"bad credit":     {func(r *replica) { r.send(wire.FrameCredit, 0, []byte{0x80}) }, "credit:"},
		"bad threads":    {func(r *replica) { r.send(wire.FrameThreads, 0, []byte{1}) }, "threads: 1 bytes, want 2"},
		"bad while busy": {func(r *replica) { r.batch(1, never, "wait"); r.send(wire.FrameHello, 0, nil) }, "frame Hello"},
	} {
		t.Run(name, func(t *testing.T) {
			eachProcess(t, func(t *testing.T, s sdk) {
				r := s.begin(t, "each")
				tc.do(r)
				r.exits(1, tc.want)
			})
		})
	}
}

// TestThreadsFrameNeverStopsTheStage asks a stage for too many threads, for fewer threads and for
// no threads. The stage keeps serving with the threads that it has.
func TestThreadsFrameNeverStopsTheStage(t *testing.T) {
	each(t, func(t *testing.T, s sdk) {
		r := s.begin(t, "each")
		for i, total := range []uint16{2, 1, 0, 65535} {
			r.send(wire.FrameThreads, 0, wire.Threads{Total: total}.Append(nil))
			if got := r.ask(uint64(i+1), "a"); got != "A" {
				t.Errorf("with %d threads: %q", total, got)
			}
		}
		r.drained()
	})
}
