package queue

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// silent is a bucket whose server answers no get until some were asked.
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

// TestGetAsksAgain has no server answer a get for some time, as while a leader is chosen.
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
