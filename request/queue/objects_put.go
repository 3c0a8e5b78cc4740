package queue

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

const (
	objectChunk = 512 << 10       // size of an object's messages; a server's default limit is 1 MiB
	sendTimeout = 5 * time.Second // of one try to send a message
)

// Subjects of an object store, as the client of NATS has them.
func (o *Objects) chunkSubject(id string) string { return "$O." + o.bucket + ".C." + id }

func (o *Objects) metaSubject(name string) string {
	return "$O." + o.bucket + ".M." + base64.URLEncoding.EncodeToString([]byte(name))
}

// Put stores an object. Nothing reads data after Put returns.
//
// The client's own Put has one message and one buffer for all chunks. If a server is lost, it sends
// earlier chunks again, and then they have the bytes of a later one, or another order. Here each
// chunk is stored before the next one is sent.
func (o *Objects) Put(ctx context.Context, name string, data []byte) error {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	err := o.disk.writing(ctx, func(ctx context.Context) error { return o.write(ctx, name, data) })
	if err != nil {
		return fmt.Errorf("put object %q: %w", name, err)
	}
	return nil
}

// write stores the chunks of an object, then its description, and then deletes the chunks of the
// object that had the name before.
func (o *Objects) write(ctx context.Context, name string, data []byte) error {
	before, err := o.store.GetInfo(ctx, name)
	if err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) {
		return err
	}
	id := rand.Text()
	n, err := o.sendChunks(ctx, id, data)
	if err != nil {
		_ = o.purge(ctx, id) // nobody reads them
		return err
	}
	// If this fails, the description may be stored all the same. The chunks stay.
	if err := o.sendMeta(ctx, name, id, data, n); err != nil {
		return err
	}
	if before != nil {
		_ = o.purge(ctx, before.NUID) // nobody reads them
	}
	return nil
}

// purge deletes the chunks with an id.
func (o *Objects) purge(ctx context.Context, id string) error {
	return o.stream.Purge(ctx, jetstream.WithPurgeSubject(o.chunkSubject(id)))
}

// sendChunks stores the chunks of an object, and returns how many there are.
func (o *Objects) sendChunks(ctx context.Context, id string, data []byte) (n uint32, err error) {
	for ; len(data) > 0; n++ {
		m := nats.NewMsg(o.chunkSubject(id))
		m.Data = data[:min(len(data), objectChunk)]
		data = data[len(m.Data):]
		m.Header.Set(jetstream.MsgIDHeader, id+"."+strconv.FormatUint(uint64(n), 10))
		if err := o.send(ctx, m); err != nil {
			return n, err
		}
	}
	return n, nil
}

// sendMeta stores the description of an object, in place of an earlier one.
func (o *Objects) sendMeta(ctx context.Context, name, id string, data []byte, chunks uint32) error {
	sum := sha256.New()
	sum.Write(data)
	info := jetstream.ObjectInfo{
		ObjectMeta: jetstream.ObjectMeta{Name: name, Opts: &jetstream.ObjectMetaOptions{ChunkSize: objectChunk}},
		Bucket:     o.bucket, NUID: id, Size: uint64(len(data)), Chunks: chunks,
		Digest: jetstream.GetObjectDigestValue(sum),
	}
	m := nats.NewMsg(o.metaSubject(name))
	var err error
	if m.Data, err = json.Marshal(info); err != nil {
		return err
	}
	m.Header.Set(jetstream.MsgRollup, jetstream.MsgRollupSubject)
	m.Header.Set(jetstream.MsgIDHeader, id)
	return o.send(ctx, m)
}

// send stores a message. If the answer does not come, it sends the message again. The stream takes
// a message once, because it has an id.
func (o *Objects) send(ctx context.Context, m *nats.Msg) error {
	for {
		try, cancel := context.WithTimeout(ctx, sendTimeout)
		_, err := o.js.PublishMsg(try, m)
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || ctx.Err() != nil {
			return err
		}
	}
}
