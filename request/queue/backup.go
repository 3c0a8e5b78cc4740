package queue

import (
	"archive/tar"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A backup is a tar archive with these entries, in this order:
//
//   - backupFirst
//   - for each stream, its backupStream and its chunks
//   - backupLast; a file without it is not complete
const (
	backupVersion = 1
	backupFirst   = "backup.json"
	backupStream  = "stream.json"
	backupLast    = "end"
)

// backupHead is the content of backupFirst.
type backupHead struct {
	V    int       `json:"v"`
	Time time.Time `json:"time"` // when the backup began
}

// storedStream is the content of backupStream: what JetStream needs to make the stream again.
type storedStream struct {
	Config json.RawMessage `json:"config"`
	State  json.RawMessage `json:"state"`
}

// Bounds of a backup's messages and waits.
const (
	backupChunk  = 512 << 10
	backupWindow = 4 << 20 // bytes that are under way
	backupAnswer = 15 * time.Second
	backupEnd    = 30 * time.Minute // of the answer to a stream's end
	backupReady  = 30 * time.Second // how long to wait until JetStream has a leader and enough servers
)

// ErrPartly means that a restore failed after it began to create streams.
var ErrPartly = errors.New("a part of the backup is restored")

// notInBackups has the streams that describe only what runs now.
var notInBackups = map[string]bool{"KV_leases": true}

// streamOrder sorts streams so that objects come last: functions are stored before their images,
// and records before their objects. An object is deleted later than the record that refers to it,
// so a backup has the objects of all its records.
//
// The membership comes last of all, so that it is restored last. It is an old one, which is not
// safe until the caller of Restore has changed it. If a restore is interrupted before that stream,
// the servers have no membership, so none of its nodes gets in.
func streamOrder(a, b string) int {
	last := func(s string) int {
		switch {
		case s == "KV_authority":
			return 2
		case strings.HasPrefix(s, "OBJ_"):
			return 1
		}
		return 0
	}
	return cmp.Or(cmp.Compare(last(a), last(b)), cmp.Compare(a, b))
}

// Backup writes all streams of the account to w, except for notInBackups. The streams may be in
// use. Each stream is stored as it is at one moment; different streams are of different moments.
// stored is called after each stream, with the size of its chunks in bytes.
func Backup(ctx context.Context, nc *nats.Conn, w io.Writer, now time.Time, stored func(stream string, size int64)) error {
	all, err := streamNames(ctx, nc)
	if err != nil {
		return err
	}
	if all = slices.DeleteFunc(all, func(s string) bool { return notInBackups[s] }); len(all) == 0 {
		return errors.New("the cluster has no streams")
	}
	slices.SortFunc(all, streamOrder)
	b := &archive{w: tar.NewWriter(w), time: now}
	b.add(backupFirst, backupHead{backupVersion, now.UTC()})
	for _, stream := range all {
		size, err := b.snapshot(ctx, nc, stream)
		if err != nil {
			return fmt.Errorf("stream %s: %w", stream, err)
		}
		stored(stream, size)
	}
	b.add(backupLast, len(all))
	return cmp.Or(b.err, b.w.Close())
}

// archive writes a backup.
type archive struct {
	w    *tar.Writer
	time time.Time
	err  error // the first error
}

func (b *archive) add(name string, value any) {
	text, err := json.Marshal(value)
	b.err = cmp.Or(b.err, err)
	b.write(name, text)
}

func (b *archive) write(name string, data []byte) {
	if b.err == nil {
		b.err = b.w.WriteHeader(&tar.Header{Name: name, Mode: 0o600, Size: int64(len(data)), ModTime: b.time, Typeflag: tar.TypeReg})
	}
	if b.err == nil {
		_, b.err = b.w.Write(data)
	}
}

// snapshot writes a stream to the archive, and returns the size of its chunks in bytes.
func (b *archive) snapshot(ctx context.Context, nc *nats.Conn, stream string) (size int64, err error) {
	if b.err != nil {
		return 0, b.err
	}
	is, chunks, err := askSnapshot(ctx, nc, stream)
	if err != nil {
		return 0, err
	}
	defer func() { _ = chunks.Unsubscribe() }() // fails if the connection is closed
	b.add(stream+"/"+backupStream, is)
	ends := false // a chunk that is not full has come, so no chunk may follow
	for n := 1; b.err == nil; n++ {
		wait, cancel := context.WithTimeout(ctx, backupAnswer)
		m, err := chunks.NextMsgWithContext(wait)
		cancel()
		if err != nil {
			return 0, err
		}
		if len(m.Data) == 0 {
			if status := m.Header.Get("Status"); status != "" && status != "204" {
				return 0, fmt.Errorf("the server stopped sending: %s %s", status, m.Header.Get("Description"))
			}
			return size, nil
		}
		if !follows(m, n) || ends {
			return 0, fmt.Errorf("chunk %d is missing: the connection was interrupted", n)
		}
		ends = m.Reply == ""
		b.write(fmt.Sprintf("%s/%06d", stream, n), m.Data)
		size += int64(len(m.Data))
		if m.Reply != "" {
			if err := m.Respond(nil); err != nil {
				return 0, err
			}
		}
	}
	return 0, b.err
}

// askSnapshot asks for a snapshot of a stream. Each attempt has its own subject for the chunks:
// otherwise, the chunks of two snapshots may get mixed.
func askSnapshot(ctx context.Context, nc *nats.Conn, stream string) (is storedStream, chunks *nats.Subscription, err error) {
	err = untilReady(ctx, func(ctx context.Context) error {
		inbox := nats.NewInbox()
		var err error
		if chunks, err = nc.SubscribeSync(inbox); err != nil {
			return err
		}
		var answer struct {
			apiAnswer
			storedStream
		}
		err = askOnce(ctx, nc, "STREAM.SNAPSHOT."+stream, map[string]any{"deliver_subject": inbox, "chunk_size": backupChunk, "window_size": backupWindow}, &answer)
		if err != nil {
			_ = chunks.Unsubscribe() // fails if the connection is closed
		}
		is = answer.storedStream
		return err
	})
	return is, chunks, err
}

// follows reports whether m is chunk n of a snapshot. A full chunk's reply subject ends in the
// chunk's size and number. Only the last chunk may have no reply subject.
func follows(m *nats.Msg, n int) bool {
	return m.Reply == "" || strings.HasSuffix(m.Reply, fmt.Sprintf(".%d.%d", len(m.Data), n))
}

// Restore creates the streams of a backup on servers that have no streams. It returns the time at
// which the backup began. restored is called after each stream, with the size of its chunks in
// bytes. If there may be streams after an error, the error is ErrPartly.
func Restore(ctx context.Context, nc *nats.Conn, r io.Reader, restored func(stream string, size int64)) (time.Time, error) {
	have, err := streamNames(ctx, nc)
	if err == nil && len(have) > 0 {
		err = fmt.Errorf("the cluster has %d streams, such as %s, want none: a restore never replaces stored data", len(have), have[0])
	}
	var head backupHead
	b := &backupReader{r: tar.NewReader(r)}
	if err == nil {
		err = b.value(backupFirst, &head)
	}
	if err == nil && head.V != backupVersion {
		err = fmt.Errorf("the backup has version %d, want %d", head.V, backupVersion)
	}
	streams := 0
	for err == nil && !b.is(backupLast) {
		var stream string
		var size int64
		if stream, size, err = b.restore(ctx, nc); err == nil {
			restored(stream, size)
			streams++
		}
	}
	if err == nil {
		err = b.end(streams)
	}
	if err != nil && b.begun {
		err = fmt.Errorf("%w: %w", ErrPartly, err)
	}
	return head.Time, err
}

// backupReader reads a backup.
type backupReader struct {
	r    *tar.Reader
	next *tar.Header // nil: not read yet
	err  error       // of the latest attempt to read next

	begun bool // a server was asked to create a stream
}

// peek returns the name of the next entry. The name is empty if err is set.
func (b *backupReader) peek() string {
	if b.next == nil && b.err == nil {
		if b.next, b.err = b.r.Next(); errors.Is(b.err, io.EOF) {
			b.err = errors.New("the file ends too early: the backup is not complete")
		}
	}
	if b.err != nil {
		return ""
	}
	return b.next.Name
}

// is reports whether the next entry has this name.
func (b *backupReader) is(name string) bool { return b.peek() == name }

// read returns the next entry.
func (b *backupReader) read() ([]byte, error) {
	if b.peek() == "" {
		return nil, b.err
	}
	if b.next.Size > 2<<20 {
		return nil, fmt.Errorf("%s has %d bytes: not a backup", b.next.Name, b.next.Size)
	}
	b.next = nil
	return io.ReadAll(b.r)
}

// value reads the next entry, which must have this name.
func (b *backupReader) value(name string, to any) error {
	if got := b.peek(); got != name && b.err == nil {
		return fmt.Errorf("%q comes next, want %s: not a backup", got, name)
	}
	text, err := b.read()
	if err == nil {
		err = json.Unmarshal(text, to)
	}
	return err
}

// end reads backupLast, which has the number of streams.
func (b *backupReader) end(got int) error {
	want := 0
	err := b.value(backupLast, &want)
	if err == nil && got != want {
		err = fmt.Errorf("the file has %d streams, and says at its end that it has %d", got, want)
	}
	return err
}

// restore creates the next stream.
func (b *backupReader) restore(ctx context.Context, nc *nats.Conn) (stream string, size int64, err error) {
	stream, _, _ = strings.Cut(b.peek(), "/")
	var is storedStream
	if err := b.value(stream+"/"+backupStream, &is); err != nil {
		return stream, 0, err
	}
	var to struct {
		apiAnswer
		Subject string `json:"deliver_subject"`
	}
	b.begun = true
	if err := ask(ctx, nc, "STREAM.RESTORE."+stream, is, &to); err != nil {
		return stream, 0, fmt.Errorf("stream %s: %w", stream, err)
	}
	for strings.HasPrefix(b.peek(), stream+"/") {
		chunk, err := b.read()
		if err == nil {
			err = b.send(ctx, nc, to.Subject, chunk)
		}
		if err != nil {
			return stream, 0, fmt.Errorf("stream %s: %w", stream, err)
		}
		size += int64(len(chunk))
	}
	if b.err != nil {
		return stream, 0, b.err
	}
	if err := b.send(ctx, nc, to.Subject, nil); err != nil { // the end
		return stream, 0, fmt.Errorf("stream %s: %w", stream, err)
	}
	return stream, size, nil
}

// send sends a chunk of a stream, and waits until the server has received it. A nil chunk ends the
// stream. A server may unpack all chunks then, so the answer to it may take long.
func (*backupReader) send(ctx context.Context, nc *nats.Conn, subject string, chunk []byte) error {
	limit := backupAnswer
	if len(chunk) == 0 {
		limit = backupEnd
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	m, err := nc.RequestWithContext(ctx, subject, chunk)
	if err != nil || len(m.Data) == 0 {
		return err
	}
	var a apiAnswer
	if err := json.Unmarshal(m.Data, &a); err != nil {
		return err
	}
	return a.error()
}

// apiAnswer is in each answer of JetStream.
type apiAnswer struct {
	Error *jetstream.APIError `json:"error"`
}

// error returns the error of the answer and clears it, so that the answer can be decoded into
// again.
func (a *apiAnswer) error() error {
	err := a.Error
	if a.Error = nil; err == nil {
		return nil
	}
	return err
}

// ask sends a request to JetStream's API. It asks again while the cluster is not ready.
func ask(ctx context.Context, nc *nats.Conn, what string, request any, answer interface{ error() error }) error {
	return untilReady(ctx, func(ctx context.Context) error { return askOnce(ctx, nc, what, request, answer) })
}

// askOnce sends a request to JetStream's API.
func askOnce(ctx context.Context, nc *nats.Conn, what string, request any, answer interface{ error() error }) error {
	text, err := json.Marshal(request)
	if err != nil {
		return err
	}
	m, err := nc.RequestWithContext(ctx, "$JS.API."+what, text)
	if err == nil {
		err = json.Unmarshal(m.Data, answer)
	}
	if err == nil {
		err = answer.error()
	}
	return err
}

// streamNames returns the names of all streams.
func streamNames(ctx context.Context, nc *nats.Conn) (all []string, err error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	err = untilReady(ctx, func(ctx context.Context) error {
		all = nil
		names := js.StreamNames(ctx)
		for name := range names.Name() {
			all = append(all, name)
		}
		return names.Err()
	})
	return all, err
}

// untilReady calls f again while JetStream has no leader, or too few servers.
func untilReady(ctx context.Context, f func(context.Context) error) error {
	for begun := time.Now(); ; {
		try, cancel := context.WithTimeout(ctx, backupAnswer)
		err := f(try)
		cancel()
		var api *jetstream.APIError
		wait := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrNoResponders) || errors.Is(err, jetstream.ErrJetStreamNotEnabled) ||
			errors.As(err, &api) && (api.ErrorCode == errNoPeers || api.ErrorCode == errNoQuorum)
		if !wait || time.Since(begun) > backupReady || !pause(ctx, startAgain) {
			return err
		}
	}
}
