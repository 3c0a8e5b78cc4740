package queue

import (
	"bytes"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
)

// TestChunksThatAreSentAgain has no server take the chunks of an object for a while, so that they
// are sent again. The object has the right bytes, and once it is replaced, the stream has the new
// ones alone.
func TestChunksThatAreSentAgain(t *testing.T) {
	t.Parallel()
	c, nc := openCluster(t, natstest.Start(t, 1), 1)
	o, err := OpenObjects(t.Context(), nc, c.Disk(), "test")
	if err != nil {
		t.Fatal(err)
	}
	is := o.stream.CachedInfo().Config
	without := is
	without.Subjects = []string{"$O.test.M.>"}
	if _, err := o.js.UpdateStream(t.Context(), without); err != nil {
		t.Fatal(err)
	}
	back := make(chan error)
	go func() {
		time.Sleep(100 * time.Millisecond)
		_, err := o.js.UpdateStream(t.Context(), is)
		back <- err
	}()
	data := make([]byte, 3*objectChunk+100)
	if _, err := rand.NewChaCha8([32]byte{}).Read(data); err != nil {
		t.Fatal(err)
	}
	err = o.Put(t.Context(), "x", data)
	if err := <-back; err != nil {
		t.Fatal(err)
	}
	if err != nil { // the chunks were away for too long
		t.Log(err)
		err = o.Put(t.Context(), "x", data)
	}
	if err != nil {
		t.Fatal(err)
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
