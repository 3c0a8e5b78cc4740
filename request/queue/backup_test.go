package queue

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
)

// TestBackup stores values, records and objects, and restores them on another server. What was
// stored after the backup is not there. Damaged backups, and servers that have streams, are
// refused.
func TestBackup(t *testing.T) {
	t.Parallel()
	large := strings.Repeat("x", 2*blobAbove)
	c, nc := openCluster(t, natstest.Start(t, 1), 1)
	kv := bucketOf(t, nc, c, "functions")
	lease := bucketOf(t, nc, c, "leases")
	bucketOf(t, nc, c, "authority")
	j := openJournal(t, nc, JournalConfig{Shards: 2})
	put := func(key, value string) {
		t.Helper()
		if _, err := kv.Put(t.Context(), key, []byte(value)); err != nil {
			t.Fatal(err)
		}
	}
	put("a.b", "1")
	if _, err := lease.Put(t.Context(), "control", []byte("held")); err != nil {
		t.Fatal(err)
	}
	enter(t, j, "f", "small", "s")
	enter(t, j, "f", "large", large)

	var file bytes.Buffer
	var stored []string
	now := time.Now().Round(0)
	if err := Backup(t.Context(), nc, &file, now, func(s string, _ int64) { stored = append(stored, s) }); err != nil {
		t.Fatal(err)
	}
	if want := []string{"DEAD", "JOURNAL-0", "JOURNAL-1", "KV_functions", "KV_replicas", "OBJ_journal", "KV_authority"}; !slices.Equal(stored, want) {
		t.Errorf("stored %q, want %q, and the membership after the objects", stored, want)
	}
	put("a.b", "2")
	enter(t, j, "f", "later", "s")
	none := func(string, int64) {}
	if _, err := Restore(t.Context(), nc, bytes.NewReader(file.Bytes()), none); err == nil || !strings.Contains(err.Error(), "want none") || errors.Is(err, ErrPartly) {
		t.Errorf("restored on a cluster that has streams: %v", err)
	}

	of := natstest.Start(t, 1)
	to, err := ClusterConfig{URLs: of.URLs()}.Dial("restore")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(to.Close)
	if _, err := Restore(t.Context(), to, strings.NewReader(large), none); err == nil || errors.Is(err, ErrPartly) {
		t.Errorf("restored from a file that is no backup: %v, want an error, and no part restored", err)
	}
	made, err := Restore(t.Context(), to, &file, none)
	if err != nil || !made.Equal(now) {
		t.Fatalf("restored a backup of %v, %v; want %v", made, err, now)
	}
	c2, nc2 := openCluster(t, of, 1)
	if b, _, err := bucketOf(t, nc2, c2, "functions").Get(t.Context(), "a.b"); err != nil || string(b) != "1" {
		t.Errorf("restored value: %q, %v; want 1", b, err)
	}
	if b, _, err := bucketOf(t, nc2, c2, "leases").Get(t.Context(), "control"); err == nil {
		t.Errorf("restored the lease %q, want none", b)
	}
	ran := make(chan string, 8)
	work(t, openJournal(t, nc2, JournalConfig{Shards: 2}), func(_ context.Context, r Record) End {
		ran <- r.ID + string(r.Data)
		return End{}
	})
	got := []string{<-ran, <-ran}
	slices.Sort(got)
	if got[0] != "large"+large || got[1] != "smalls" || len(ran) > 0 {
		t.Errorf("%.20q ran, and %d more; want large and small", got, len(ran))
	}
}

// TestBackupThatIsCut restores backups that are cut before an entry, as a copy on a full disk may
// be. Each of them is refused.
func TestBackupThatIsCut(t *testing.T) {
	t.Parallel()
	c, nc := openCluster(t, natstest.Start(t, 1), 1)
	if _, err := bucketOf(t, nc, c, "functions").Put(t.Context(), "a", []byte("1")); err != nil {
		t.Fatal(err)
	}
	var file bytes.Buffer
	if err := Backup(t.Context(), nc, &file, time.Now(), func(string, int64) {}); err != nil {
		t.Fatal(err)
	}
	const block = 512
	whole, cut := file.Bytes(), 0
	for at := block; at < len(whole)-2*block; at += block {
		if name := string(bytes.TrimRight(whole[at:at+100], "\x00")); name != backupLast && !strings.HasPrefix(name, "KV_") {
			continue
		}
		cut++
		of := natstest.Start(t, 1)
		to, err := ClusterConfig{URLs: of.URLs()}.Dial("restore")
		if err != nil {
			t.Fatal(err)
		}
		_, err = Restore(t.Context(), to, io.LimitReader(bytes.NewReader(whole), int64(at)), func(string, int64) {})
		if err == nil || !strings.Contains(err.Error(), "not complete") {
			t.Errorf("restored the first %d of %d bytes: %v", at, len(whole), err)
		}
		if have, failed := streamNames(t.Context(), to); failed != nil || len(have) > 0 && !errors.Is(err, ErrPartly) {
			t.Errorf("the first %d bytes: streams %q, %v, after %v; want %v", at, have, failed, err, ErrPartly)
		}
		to.Close()
		of.Kill(0)
	}
	other := bytes.Clone(whole)
	other[bytes.LastIndex(other, []byte("\x002\x00"))+1] = '3' // the number of streams
	to, err := ClusterConfig{URLs: natstest.Start(t, 1).URLs()}.Dial("restore")
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()
	if _, err := Restore(t.Context(), to, bytes.NewReader(other), func(string, int64) {}); err == nil || !strings.Contains(err.Error(), "2 streams") {
		t.Errorf("restored 2 streams of 3: %v", err)
	}
	if cut < 3 {
		t.Errorf("%d cuts, want at least 3: the test proves little", cut)
	}
}

// chunk is a message of a snapshot.
type chunk struct{ data, reply string }

// TestSnapshotsWithGaps stores snapshots of a server that loses chunks, or sends more than once.
// Only the whole one is accepted. The chunks of an earlier attempt are not mixed with it.
func TestSnapshotsWithGaps(t *testing.T) {
	t.Parallel()
	first, second, last := chunk{"aaa", "ack.3.1"}, chunk{"bbb", "ack.3.2"}, chunk{"c", ""}
	for name, c := range map[string]struct {
		chunks []chunk
		size   int64 // 0: refused
	}{
		"whole":              {[]chunk{first, second, last}, 7},
		"full chunks only":   {[]chunk{first, second}, 6},
		"without the first":  {[]chunk{second, last}, 0},
		"without the second": {[]chunk{first, {"ccc", "ack.3.3"}}, 0},
		"with one twice":     {[]chunk{first, first, second}, 0},
		"with a short one":   {[]chunk{{"aa", "ack.3.1"}, second}, 0},
		"longer than it is":  {[]chunk{first, last, second}, 0},
		"with two ends":      {[]chunk{first, last, last}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := &archive{w: tar.NewWriter(io.Discard), time: time.Now()}
			size, err := b.snapshot(t.Context(), snapshots(t, c.chunks), "S")
			if size != c.size || (err == nil) != (size > 0) {
				t.Errorf("%d bytes, %v; want %d", size, err, c.size)
			}
			if err != nil && !strings.Contains(err.Error(), "is missing") {
				t.Error(err)
			}
		})
	}
}

// snapshots connects to a server that sends these chunks as the snapshot of stream S. It refuses
// the first request for it, and still sends chunks for that request later.
func snapshots(t *testing.T, chunks []chunk) *nats.Conn {
	t.Helper()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoLog: true, NoSigs: true})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(s.Shutdown)
	connect := func() *nats.Conn {
		nc, err := nats.Connect("", nats.InProcessServer(s))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(nc.Close)
		return nc
	}
	nc := connect()
	var first string // the subject for the chunks of the first request
	_, err = nc.Subscribe("$JS.API.STREAM.SNAPSHOT.S", func(m *nats.Msg) {
		var ask struct {
			To string `json:"deliver_subject"`
		}
		err := json.Unmarshal(m.Data, &ask)
		if first == "" {
			first = ask.To
			err = errors.Join(err, m.Respond([]byte(`{"error":{"code":503,"err_code":10005}}`)))
		} else {
			err = errors.Join(err, m.Respond([]byte("{}")))
			for _, c := range append(chunks, chunk{}) {
				msg := &nats.Msg{Subject: first, Reply: c.reply, Data: []byte(c.data)}
				err = errors.Join(err, nc.PublishMsg(msg))
				msg.Subject = ask.To
				err = errors.Join(err, nc.PublishMsg(msg))
			}
		}
		if err != nil {
			t.Error(err)
		}
	})
	if err = errors.Join(err, nc.Flush()); err != nil {
		t.Fatal(err)
	}
	return connect()
}

func bucketOf(t *testing.T, nc *nats.Conn, c *Cluster, bucket string) *KV {
	t.Helper()
	kv, err := OpenKV(t.Context(), nc, c.Disk(), bucket)
	if err != nil {
		t.Fatal(err)
	}
	return kv
}
