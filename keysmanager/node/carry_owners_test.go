package node

import (
	"context"
	"log/slog"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// lateItems are Items that come when the test says so.
type lateItems struct {
	Items

	come chan struct{}
}

func (lateItems) Reserve(context.Context, []tensor.Ref) (func(), error) { return func() {}, nil }

func (l lateItems) Fetch(context.Context, tensor.Ref) (*os.File, error) {
	<-l.come
	return wire.NewMemory()
}

// TestCarryForgetsAnsweredBatches checks that a carry forgets a batch when its calls are answered,
// even if some calls were canceled before and never reached the replica.
func TestCarryForgetsAnsweredBatches(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]wire.Socket
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		ends[i], err = wire.OpenSocket(f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
		defer ends[i].Close()
	}
	late := lateItems{come: make(chan struct{})}
	c := newCarry(late, running{}, wire.NewOutlet(ends[0]), wire.NewOutlet(ends[0]), slog.New(slog.DiscardHandler))
	item := tensor.Item{Ref: &tensor.Ref{Owner: "q", Blob: "x", Keeper: tensor.Keeper{Node: "z"}}}
	call := wire.Call{Input: tensor.Input{{Items: tensor.Activation{item}}}}
	if _, err := c.toReplica(&wire.Frame{Type: wire.FrameBatch, Batch: 1, Payload: wire.Batch{Calls: []wire.Call{call, call}}.Append(nil), Keep: true, Kept: true}); err != nil {
		t.Fatal(err)
	}
	cancel := wire.Frame{Type: wire.FrameCancel, Batch: 1, Payload: wire.Cancel{Index: 0}.Append(nil)}
	if _, err := c.toReplica(&cancel); err != nil {
		t.Fatal(err)
	}
	close(late.come)
	c.work.Wait()
	if _, err := c.fromReplica(&wire.Frame{Type: wire.FrameResult, Batch: 1, Payload: wire.Result{}.Append(nil)}); err != nil {
		t.Fatal(err)
	}
	if len(c.owners) != 0 {
		t.Errorf("owners of %d batches are left", len(c.owners))
	}
	c.close()
}
