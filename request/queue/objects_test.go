package queue

import (
	"bytes"
	"context"
	"math/rand/v2"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
)

// lossy is JetStream whose next answers to stored messages are lost.
type lossy struct {
	jetstream.JetStream
	lost  int // how many
	calls int // of PublishMsg
}

func (l *lossy) PublishMsg(ctx context.Context, m *nats.Msg, opts ...jetstream.PublishOpt) (*jetstream.PubAck, error) {
	ack, err := l.JetStream.PublishMsg(ctx, m, opts...)
	l.calls++
	if err == nil && l.lost > 0 {
		l.lost--
		return nil, context.DeadlineExceeded
	}
	return ack, err
}

// TestChunksThatAreSentAgain loses the answers to a chunk of an object, so that the chunk is sent
// again. The stream takes it once, and the object has the right bytes. Once the object is replaced,
// the stream has the new bytes alone.
func TestChunksThatAreSentAgain(t *testing.T) {
	t.Parallel()
	c, nc := openCluster(t, natstest.Start(t, 1), 1)
	o, err := OpenObjects(t.Context(), nc, c.Disk(), "test")
	if err != nil {
		t.Fatal(err)
	}
	const lost = 2
	js := &lossy{JetStream: o.js, lost: lost}
	o.js = js
	data := make([]byte, 3*objectChunk+100)
	if _, err := rand.NewChaCha8([32]byte{}).Read(data); err != nil {
		t.Fatal(err)
	}
	if err := o.Put(t.Context(), "x", data); err != nil {
		t.Fatal(err)
	}
	const messages = 4 + 1 // chunks, and the description
	info, err := o.stream.Info(t.Context())
	if err != nil || js.calls != messages+lost || info.State.Msgs != messages {
		t.Errorf("%d messages sent, %d stored, %v; want %d and %d", js.calls, info.State.Msgs, err, messages+lost, messages)
	}
	if got, err := o.Get(t.Context(), "x"); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v, and they are equal: %v", len(got), err, bytes.Equal(got, data))
	}
	if err := o.Put(t.Context(), "x", nil); err != nil {
		t.Fatal(err)
	}
	got, err := o.Get(t.Context(), "x")
	info, infoErr := o.stream.Info(t.Context(), jetstream.WithSubjectFilter(">"))
	if err != nil || infoErr != nil || len(got) > 0 || len(info.State.Subjects) != 1 {
		t.Errorf("%d bytes, %v; messages on %v, %v; want an empty object and its description", len(got), err, info.State.Subjects, infoErr)
	}
}
