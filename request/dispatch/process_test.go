package dispatch

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// infer is the handler of the stage that this test binary becomes when it is started as one.
func infer(c *stage.Call) (tensor.Activation, error) {
	in := c.Items()
	switch {
	case len(in) == 1 && string(in[0].Bytes) == "wait":
		<-c.Context().Done()
		return nil, c.Context().Err()
	case len(in) == 1 && string(in[0].Bytes) == "stream":
		_, err := c.Write([]byte("first, "))
		return tensor.Activation{text("second")}, err
	case len(in) == 1 && string(in[0].Bytes) == "bad":
		return nil, stage.BadInput(errors.New("got bad, want good"))
	}
	for i := range in {
		in[i].Bytes = bytes.ToUpper(in[i].Bytes)
	}
	return in, nil
}

// process starts a stage process, attaches it, and reports its end to the Shell.
func process(t *testing.T, s *Shell, name string) *os.Process {
	t.Helper()
	near, far := pair(t)
	file, err := far.(interface{ File() (*os.File, error) }).File()
	if err != nil {
		t.Fatal(err)
	}
	_ = far.Close()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), wire.EnvStageFD+"=3", wire.EnvFunction+"=f.ns", wire.EnvReplica+"="+name)
	cmd.ExtraFiles = []*os.File{file}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_ = file.Close()
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = cmd.Wait() // its state says how it ended
		s.Lost(pipeline.ParseKey("f.ns"), name, task.Death{Cause: cmd.ProcessState.String()})
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended already
		<-ended
	})
	if _, err := s.Attach(t.Context(), pipeline.ParseKey("f.ns"), name, 1, near); err != nil {
		t.Fatal(err)
	}
	return cmd.Process
}

// TestRealParts uses no fakes: stage processes, NATS and files are real.
func TestRealParts(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	server, err := queue.StartServer(queue.ServerConfig{Dir: t.TempDir(), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Close)
	nc, err := server.Connect("test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	bus := queue.NewBus(nc)
	store, err := tensor.OpenDir(t.TempDir(), 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	s, err := New(Config{Bus: bus, Store: store, Logger: log, Registerer: prometheus.NewRegistry()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	if err := s.Ensure(Spec{Function: pipeline.ParseKey("f.ns")}); err != nil {
		t.Fatal(err)
	}
	replies := make(chan *task.Reply, 1000)
	inbox, stop, err := bus.Inbox(func(msg []byte) {
		r, err := wire.DecodeReply(msg)
		if err != nil {
			t.Error(err)
		}
		replies <- r
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	submit := func(name string, attempt uint8, items ...tensor.Item) {
		t.Helper()
		in := newTask(name, 0)
		in.Attempt, in.ReplyTo, in.Input = attempt, inbox, tensor.Input{{Items: items}}
		if err := bus.Submit("f.ns", wire.AppendTask(nil, in)); err != nil {
			t.Fatal(err)
		}
	}

	first := process(t, s, "f-1")
	large := text(strings.Repeat("x", 1<<20))
	items, err := tensor.Externalise(store, "a", tensor.Activation{text("hello"), large})
	if err != nil {
		t.Fatal(err)
	}
	submit("a", 1, items...)
	r := receive(t, replies, "reply")
	out, err := tensor.Resolve(store, r.Output)
	if err != nil || r.Code != task.OK || len(out) != 2 || string(out[0].Bytes) != "HELLO" || string(out[1].Bytes) != strings.Repeat("X", 1<<20) {
		t.Fatalf("reply %s %q with %d items, %v", codeNames[r.Code], r.Message, len(out), err)
	}
	submit("bad", 1, text("bad"))
	if r := receive(t, replies, "reply"); r.Code != task.BadInput || !strings.Contains(r.Message, "want good") {
		t.Errorf("reply %+v, want bad input", r)
	}
	submit("stream", 1, text("stream"))
	if r := receive(t, replies, "reply"); r.Code != task.OK || string(r.Output[0].Bytes) != "first, second" {
		t.Errorf("reply %+v, want the stream put together", r)
	}

	submit("b", 1, text("wait"))
	submit("c", 1, text("wait"))
	for s.Load(pipeline.ParseKey("f.ns")).Running != 2 { // both slots are taken
		if len(replies) > 0 {
			t.Fatalf("%+v", <-replies)
		}
	}
	submit("d", 1, text("d"))
	if err := first.Kill(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if r := receive(t, replies, "reply"); r.Code != task.ReplicaLost || r.Message != "signal: killed" || r.Replica != "f-1" {
			t.Errorf("reply %s %q, want lost with the signal", codeNames[r.Code], r.Message)
		}
	}
	process(t, s, "f-2")
	if r := receive(t, replies, "reply"); r.Request != "d" || string(r.Output[0].Bytes) != "D" || r.Replica != "f-2" {
		t.Errorf("reply %+v, want d from f-2", r)
	}
	submit("b", 2, text("again"))
	if r := receive(t, replies, "reply"); r.Attempt != 2 || string(r.Output[0].Bytes) != "AGAIN" {
		t.Errorf("second attempt: %+v", r)
	}
	submit("e", 1, text("wait"))
	for s.Load(pipeline.ParseKey("f.ns")).Running != 1 {
		if len(replies) > 0 {
			t.Fatalf("%+v", <-replies)
		}
	}
	if err := bus.Submit("f.ns", wire.AppendCancel(nil, newTask("e", 0).Key, "f.ns")); err != nil {
		t.Fatal(err)
	}
	if r := receive(t, replies, "reply"); r.Code != task.Canceled {
		t.Errorf("reply %+v, want canceled", r)
	}
	// The replica is idle only once the canceled call is answered.
	if err := s.Drain(t.Context(), pipeline.ParseKey("f.ns"), "f-2"); err != nil {
		t.Error(err)
	}
	select {
	case <-s.function(pipeline.ParseKey("f.ns")).gone("f-2"):
	case <-time.After(patience):
		t.Error("the drained process did not close its socket")
	}
}

// gone returns a channel that is closed when no replica has that name.
func (f *function) gone(name string) <-chan struct{} {
	if l := f.link(name); l != nil {
		return l.gone
	}
	done := make(chan struct{})
	close(done)
	return done
}
