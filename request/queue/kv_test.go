package queue

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// silent is a bucket whose server does not answer the first gets.
type silent struct {
	jetstream.KeyValue
	left int // gets without an answer
}

func (s *silent) Get(context.Context, string) (jetstream.KeyValueEntry, error) {
	if s.left--; s.left >= 0 {
		return nil, nats.ErrNoResponders
	}
	return nil, jetstream.ErrKeyNotFound
}

// TestGetAsksAgain checks that Get asks again if no server answers, as while servers choose a
// leader.
func TestGetAsksAgain(t *testing.T) {
	for _, tc := range []struct {
		unanswered int
		want       error
	}{{mostGets - 1, ErrNotFound}, {mostGets, nats.ErrNoResponders}} {
		synctest.Test(t, func(t *testing.T) {
			k := &KV{kv: &silent{left: tc.unanswered}}
			if _, _, err := k.Get(t.Context(), "x"); !errors.Is(err, tc.want) {
				t.Errorf("%d gets without an answer: %v, want %v", tc.unanswered, err, tc.want)
			}
		})
	}
}

// change is a change of a key.
type change struct {
	jetstream.KeyValueEntry
	revision uint64
}

func (c change) Key() string                     { return Token("x") }
func (c change) Value() []byte                   { return nil }
func (c change) Revision() uint64                { return c.revision }
func (c change) Operation() jetstream.KeyValueOp { return jetstream.KeyValuePut }

// TestWatchWaitsForACopyThatIsBehind watches a copy of a bucket that lacks the latest change at
// first. If the copy never gets the change, Watch stops waiting.
func TestWatchWaitsForACopyThatIsBehind(t *testing.T) {
	for name, late := range map[string]bool{"gets it": false, "never gets it": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var got []uint64
				synced, from, ended := make(chan struct{}), make(chan jetstream.KeyValueEntry), make(chan bool)
				f := follower{f: func(e Entry) { got = append(got, e.Revision) }, synced: synced, latest: 2, lagMost: time.Minute}
				go func() { ended <- f.updates(t.Context(), from, nil) }()
				isSynced := func() bool {
					synctest.Wait()
					select {
					case <-synced:
						return true
					default:
						return false
					}
				}
				from <- change{revision: 1}
				from <- nil
				if isSynced() {
					t.Error("synced without the latest change")
				}
				want := []uint64{1, 2}
				if late {
					time.Sleep(time.Minute)
					want = want[:1]
				} else {
					from <- change{revision: 2}
				}
				if !isSynced() || !slices.Equal(got, want) {
					t.Errorf("synced: %v, got changes %d, want %d", isSynced(), got, want)
				}
				close(from)
				<-ended
			})
		})
	}
}
