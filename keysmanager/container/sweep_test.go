package container

import (
	"encoding/json"
	"fmt"
	"io"
	"os/exec"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// startActor starts a process that starts two containers and prints the pids of their programs.
func startActor(t *testing.T, cfg Config) (*exec.Cmd, io.Reader) {
	t.Helper()
	rootFor(t)
	text, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", actAs, string(text))
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, out
}

// actor starts a process with two containers, and returns the pids of their programs.
func actor(t *testing.T, cfg Config) (cmd *exec.Cmd, pids [2]int) {
	t.Helper()
	cmd, out := startActor(t, cfg)
	if _, err := fmt.Fscan(out, &pids[0], &pids[1]); err != nil {
		t.Fatal(err)
	}
	return cmd, pids
}

// kill kills a process with containers, and waits for the end of their programs.
func kill(t *testing.T, cmd *exec.Cmd, pids ...int) {
	t.Helper()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	for _, pid := range pids {
		proctest.Gone(t, pid)
	}
}

// leftByAWatchdog has another process leave two containers, and returns a process of the platform
// that has ended. Forget of that begins a Sweep.
func leftByAWatchdog(t *testing.T, s *containerdtest.Server, r *Runtime) sandbox.Process {
	t.Helper()
	cmd, pids := actor(t, config(t, s))
	kill(t, cmd, pids[:]...)
	return platformProcess(t, r)
}

// platformProcess returns a process of the platform that has ended.
func platformProcess(t *testing.T, r *Runtime) sandbox.Process {
	t.Helper()
	p, err := r.Start(t.Context(), sandbox.Command{Argv: []string{"true"}, Purpose: sandbox.Purpose{Platform: true}})
	if err != nil {
		t.Fatal(err)
	}
	p.Wait()
	return p
}

// closeLate begins to close a Runtime. The channel is closed at the end of Close.
func closeLate(t *testing.T, r *Runtime) <-chan struct{} {
	t.Helper()
	closed := make(chan struct{})
	go func() { defer close(closed); r.Close() }() // the test waits for it
	within(t, "the beginning of Close", r.open.Done())
	return closed
}

// TestOneSweepWaits checks that at most one Sweep waits if watchdogs end while a Sweep runs. Close
// does not begin others.
func TestOneSweepWaits(t *testing.T) {
	s := containerdtest.Start(t)
	p := s.Proxy()
	r := openAt(t, s, p)
	var ended []sandbox.Process
	for range 4 {
		ended = append(ended, platformProcess(t, r))
	}
	first, second, third := p.HoldRequest("Containers/ListStream"), p.HoldRequest("Containers/ListStream"), p.HoldRequest("Containers/ListStream")
	ended[0].Forget()
	within(t, "the first Sweep", first.Came)
	for _, p := range ended[1:] {
		p.Forget()
	}
	first.Release()
	within(t, "the second Sweep", second.Came)
	closed := closeLate(t, r)
	second.Release()
	within(t, "the end of Close", closed)
	select {
	case <-third.Came:
		t.Error("a third Sweep, want two")
	default:
	}
}

// TestCloseFinishesSweeps closes a Runtime while it sweeps. No container may be left without its
// folder, by which it would be found.
func TestCloseFinishesSweeps(t *testing.T) {
	s := containerdtest.Start(t)
	p := s.Proxy()
	for _, method := range []string{"Containers/ListStream", "Containers/Get", "Tasks/Delete", "Containers/Delete"} {
		t.Run(method, func(t *testing.T) {
			r := openAt(t, s, p)
			watchdog, held := leftByAWatchdog(t, s, r), p.HoldRequest(method)
			watchdog.Forget()
			within(t, "the call", held.Came)
			closed := closeLate(t, r)
			held.Release()
			within(t, "the end of Close", closed)
			nothingLeft(t, s)
		})
	}
}

// TestSweepsThatFailAreTriedAgain has a watchdog end while containerd is away.
func TestSweepsThatFailAreTriedAgain(t *testing.T) {
	s := containerdtest.Start(t)
	p := s.Proxy()
	for name, again := range map[string]func(r *Runtime){
		"start": func(r *Runtime) {
			started := start(t, r, sleeper())
			end(t, started)
			started.Forget()
			r.removes.Wait()
			nothingLeft(t, s)
		},
		"close": func(*Runtime) {},
		"close while containerd is away": func(r *Runtime) {
			s.Kill()
			closed := closeLate(t, r)
			s.Run()
			within(t, "the end of Close", closed)
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := openAt(t, s, p)
			watchdog := leftByAWatchdog(t, s, r)
			s.Kill()
			watchdog.Forget()
			r.removes.Wait() // the Sweep has failed
			s.Run()
			proctest.Until(t, "containerd answers", func() bool { _, err := r.client.Version(t.Context()); return err == nil })
			if have := left(t, s); len(have) == 0 {
				t.Error("nothing is left, want the containers")
			}
			again(r)
			r.Close()
			nothingLeft(t, s)
		})
	}
}

// TestContainersThatAppearAfterASweepAreRemoved kills a process whose container containerd makes
// only after the next Sweep.
func TestContainersThatAppearAfterASweepAreRemoved(t *testing.T) {
	s := containerdtest.Start(t)
	p := s.Proxy()
	r := openAt(t, s, p)
	held := p.HoldRequest("Containers/Create")
	cfg := config(t, s)
	cfg.Address = p.Address
	cmd, _ := startActor(t, cfg)
	within(t, "the call", held.Came)
	kill(t, cmd)
	r.Sweep(t.Context())
	closed := closeLate(t, r)
	held.Release()
	proctest.Until(t, "containerd has the container", func() bool {
		all, err := s.Client(s.Namespace).Containers(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return len(all) > 0
	})
	within(t, "the end of Close", closed)
	nothingLeft(t, s)
}
