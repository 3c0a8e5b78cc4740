package zygote

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// rig has a worker whose process is the test. The tests of package keysmanager have real zygotes.
type rig struct {
	*Zygote
	t     *testing.T
	peer  *net.UnixConn // the process's end of the control socket
	tasks *sync.WaitGroup
}

func newRig(t *testing.T) *rig {
	t.Helper()
	ours, theirs, err := Socketpair(unix.SOCK_SEQPACKET)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	peer, err := unixConn(theirs)
	if err != nil {
		t.Fatal(err)
	}
	w, tasks := warden.InProcess(sandbox.NewSpawner()), new(sync.WaitGroup)
	ended := make(chan warden.Exit, 1)
	ended <- warden.Exit{Err: errors.New("it went away")}
	z := newZygote(&Host{
		Warden: w, Pool: resources.NewPool(resources.Config{Warden: w, Log: slog.New(slog.DiscardHandler)}), Exits: new(resources.Ends),
		Context: t.Context(), Detached: make(chan struct{}), Tasks: tasks, Log: slog.New(slog.DiscardHandler),
		Output: func(string, string, string, string) {},
	}, Key{Form: Worker}, "worker-x", "f.ns")
	z.PID, z.control.conn, z.ended = os.Getpid(), ours, ended
	if z.output, err = sandbox.NewOutput(z.prints); err != nil {
		t.Fatal(err)
	}
	go z.read()
	t.Cleanup(func() {
		_ = peer.Close()
		<-z.Gone()
		tasks.Wait()
		w.Close()
	})
	return &rig{z, t, peer, tasks}
}

// hears returns the next order to the worker, with its descriptor, if any.
func (r *rig) hears() (wire.Order, *net.UnixConn) {
	r.t.Helper()
	_ = r.peer.SetReadDeadline(time.Now().Add(time.Minute))
	buf, oob := make([]byte, MaxOrder), make([]byte, unix.CmsgSpace(4))
	n, m, _, _, err := r.peer.ReadMsgUnix(buf, oob)
	if err != nil {
		r.t.Fatal(err)
	}
	o, err := wire.DecodeOrder(buf[:n])
	if err != nil || m == 0 {
		return o, nil
	}
	messages, err := unix.ParseSocketControlMessage(oob[:m])
	if err != nil {
		r.t.Fatal(err)
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		r.t.Fatal(err)
	}
	f := os.NewFile(uintptr(fds[0]), "gate")
	defer f.Close()
	gate, err := unixConn(f)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { _ = gate.Close() })
	return o, gate
}

func (r *rig) says(o wire.Order) {
	r.t.Helper()
	o.Version = wire.OrderVersion
	if _, err := r.peer.Write(wire.AppendOrder(nil, o)); err != nil {
		r.t.Fatal(err)
	}
}

// replica is a Replica that records its calls.
type replica struct {
	pid, id int
	ended   chan resources.Ending
}

func newReplica() *replica                     { return &replica{ended: make(chan resources.Ending, 1)} }
func (r *replica) Take(*resources.Reservation) {}
func (r *replica) Began(pid, id int)           { r.pid, r.id = pid, id }
func (r *replica) End(e resources.Ending)      { r.ended <- e }
func (r *replica) Abandon()                    {}

// forks forks a replica in the background.
func (r *rig) forks(ctx context.Context, to *replica) <-chan error {
	done := make(chan error, 1)
	r.tasks.Go(func() {
		_, err := r.Family.Fork(ctx, ForkOrder{Replica: to, Message: []byte("begin")})
		done <- err
	})
	return done
}

// TestForkTakesAnotherChildIfTheSpareHasEnded ends the spare child after an order has claimed it.
func TestForkTakesAnotherChildIfTheSpareHasEnded(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	gate, theirs, err := Socketpair(unix.SOCK_SEQPACKET)
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	r.Family.mu.Lock()
	// It does not wait any more.
	r.Family.spareSlots[""] = &spareSlot{child: &child{id: 7, gate: gate, held: r.host.Pool.New()}}
	r.Family.mu.Unlock()
	to := newReplica()
	done := r.forks(t.Context(), to)
	o, next := r.hears()
	if o.Kind != wire.OrderFork {
		t.Fatalf("order %c, want a fork", o.Kind)
	}
	r.says(wire.Order{Kind: wire.ChildForked, ID: o.ID, PID: 8})
	if err := <-done; err != nil || to.id != 8 || to.pid != os.Getpid() || r.Family.Replicas() != 1 {
		t.Errorf("%v, replica %+v of %d, want the thread 8", err, to, r.Family.Replicas())
	}
	buf := make([]byte, 100)
	if n, err := next.Read(buf); err != nil || string(buf[:n]) != "begin" {
		t.Errorf("the new child was told %q, %v", buf[:n], err)
	}
	if n, err := theirs.Read(buf); n > 0 || !errors.Is(err, io.EOF) {
		t.Errorf("the gate of the one that had ended: %d bytes, %v, want its end", n, err)
	}
}

// TestAChildOfAnOrderThatWasGivenUpIsKilled checks that a child that comes after its order was
// given up is killed.
func TestAChildOfAnOrderThatWasGivenUpIsKilled(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	done := r.forks(ctx, newReplica())
	o, _ := r.hears()
	cancel(errors.New("nobody wants it"))
	if err := <-done; err == nil || !strings.Contains(err.Error(), "nobody wants it") || r.Family.Replicas() != 0 {
		t.Errorf("%v and %d replicas, want why it was given up, and none", err, r.Family.Replicas())
	}
	r.says(wire.Order{Kind: wire.ChildForked, ID: o.ID, PID: 9})
	if kill, _ := r.hears(); kill.Kind != wire.OrderKill || kill.PID != 9 || kill.Signal != uint16(unix.SIGKILL) {
		t.Errorf("order %+v, want SIGKILL for 9", kill)
	}
}

// TestTheEndOfAZygoteIsItsChildrens checks that the end of a zygote ends its children, and fails
// orders that wait for an answer.
func TestTheEndOfAZygoteIsItsChildrens(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	first, second := newReplica(), newReplica()
	done := r.forks(t.Context(), first)
	o, _ := r.hears()
	r.says(wire.Order{Kind: wire.ChildForked, ID: o.ID, PID: 8})
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	done = r.forks(t.Context(), second)
	r.hears()
	_ = r.peer.Close()
	const want = "its worker ended: it went away"
	if err := <-done; err == nil || err.Error() != want {
		t.Errorf("the order: %v, want %q", err, want)
	}
	if got := <-first.ended; got.Cause != want {
		t.Errorf("the replica: %q, want %q", got, want)
	}
	<-r.Gone()
	if r.Alive() || r.Died() == nil || r.Died().Error() != want || len(second.ended) > 0 {
		t.Errorf("alive %t, died of %q, want %q", r.Alive(), r.Died(), want)
	}
	if _, err := r.Family.Fork(t.Context(), ForkOrder{Replica: second}); err == nil || err.Error() != want {
		t.Errorf("a later order: %v, want %q", err, want)
	}
}
