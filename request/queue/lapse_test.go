package queue

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
)

// deaf is a stream whose answers to deletions are lost while lost is set.
type deaf struct {
	jetstream.Stream
	lost    *atomic.Bool
	deleted chan struct{} // receives after the first deletion whose answer is lost
}

func (d deaf) DeleteMsg(ctx context.Context, seq uint64) error {
	err := d.Stream.DeleteMsg(ctx, seq)
	if !d.lost.Load() {
		return err
	}
	select {
	case d.deleted <- struct{}{}:
	default:
	}
	return errors.Join(err, context.DeadlineExceeded)
}

// TestLapseInTheMiddleOfAChange stops the work on a journal after a record's next state is stored
// and its previous state is deleted, but before the answer to the deletion arrives. When the same
// process works on the journal again, it goes on with the next state.
func TestLapseInTheMiddleOfAChange(t *testing.T) {
	for name, first := range map[string]End{
		"a result":        {Callback: []byte("result"), To: "host"},
		"another attempt": {Err: errors.New("failed"), Again: true},
	} {
		t.Run(name, func(t *testing.T) {
			_, nc := openCluster(t, natstest.Start(t, 1), 0)
			j := openJournal(t, nc, JournalConfig{})
			lost, deleted := &atomic.Bool{}, make(chan struct{}, 1)
			for i, s := range j.shards {
				j.shards[i] = deaf{s, lost, deleted}
			}
			lost.Store(true)
			var mu sync.Mutex
			var got []Record
			run := func(_ context.Context, r Record) End {
				mu.Lock()
				defer mu.Unlock()
				got = append(got, r)
				if len(got) == 1 {
					return first
				}
				return End{}
			}
			stop := work(t, j, run)
			enter(t, j, "f", "a", "x")
			<-deleted
			stop()
			lost.Store(false)
			work(t, j, run)
			empty(t, j)
			mu.Lock()
			defer mu.Unlock()
			if len(got) != 2 {
				t.Fatalf("%d pieces of work, want two: %+v", len(got), got)
			}
			if last := got[1]; first.Callback != nil && (last.Kind != Callback || string(last.Data) != "result") || first.Again && last.Attempt != 2 {
				t.Errorf("the second piece of work is %+v", last)
			}
		})
	}
}
