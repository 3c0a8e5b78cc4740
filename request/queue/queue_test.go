package queue

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
)

func TestMain(m *testing.M) {
	natstest.Main()
	if dir := os.Getenv("JOURNAL_WRITER"); dir != "" {
		writeJournal(dir)
	}
	goleak.VerifyTestMain(m)
}

func start(t *testing.T, dir string) *nats.Conn {
	t.Helper()
	s, err := StartServer(ServerConfig{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return connect(t, s)
}

func connect(t *testing.T, s *Server) *nats.Conn {
	t.Helper()
	nc, err := s.Connect(t.Name())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	disks.Store(nc, s.Disk())
	return nc
}

// disks maps each connection to the disk of its server.
var disks sync.Map

func diskOf(t testing.TB, nc *nats.Conn) *Disk {
	t.Helper()
	d, ok := disks.Load(nc)
	if !ok {
		t.Fatal("a connection of no server of a test")
	}
	return d.(*Disk)
}

func TestTokenRoundTrip(t *testing.T) {
	for name, want := range map[string]string{
		"ocr.openfaas-fn": "ocr=2Eopenfaas-fn",
		"a.b.c":           "a=2Eb=2Ec",
		"x=2E":            "x=3D2E",
		"*>":              "=2A=3E",
		"":                "",
	} {
		if got := Token(name); got != want {
			t.Errorf("Token(%q) = %q, want %q", name, got, want)
		}
		if back, err := Name(want); err != nil || back != name {
			t.Errorf("Name(%q) = %q, %v, want %q", want, back, err, name)
		}
	}
	for _, bad := range []string{"=", "a=2", "=ZZ"} {
		if got, err := Name(bad); err == nil {
			t.Errorf("Name(%q) = %q, want an error", bad, got)
		}
	}
}

func FuzzToken(f *testing.F) {
	f.Add("ocr.openfaas-fn")
	f.Add("=2E\x00ü ")
	f.Fuzz(func(t *testing.T, name string) {
		token := Token(name)
		if strings.ContainsAny(token, ". *>\t") {
			t.Fatalf("Token(%q) = %q has a character with a meaning in subjects", name, token)
		}
		if back, err := Name(token); err != nil || back != name {
			t.Fatalf("Name(Token(%q)) = %q, %v", name, back, err)
		}
	})
}

func TestBusCarriesTasksInOrderAndReplies(t *testing.T) {
	b := NewBus(start(t, t.TempDir()))
	const n = 1000
	got := make(chan string, n)
	inbox, stopInbox, err := b.Inbox(func(m []byte) { got <- string(m) })
	if err != nil {
		t.Fatal(err)
	}
	promised := false
	stopTasks, err := b.Tasks("ocr.v1.openfaas-fn", func(m []byte, more bool) {
		promised = more
		if err := b.Reply(inbox, m); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	for i := range n {
		if err := b.Submit("ocr.v1.openfaas-fn", fmt.Append(nil, i)); err != nil {
			t.Fatal(err)
		}
	}
	for i := range n {
		if s := <-got; s != fmt.Sprint(i) {
			t.Fatalf("reply %d is %q", i, s)
		}
	}
	stopTasks()
	stopInbox()
	if promised {
		t.Error("the last task's handler was told that another one follows")
	}
}

func TestKVWatchSeesOldValuesAndChanges(t *testing.T) {
	ctx := t.Context()
	dir := t.TempDir()
	s, err := StartServer(ServerConfig{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	nc, err := s.Connect("first")
	if err != nil {
		t.Fatal(err)
	}
	kv, err := OpenKV(ctx, nc, s.Disk(), "functions")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Put(ctx, "a.b.ns", []byte("1")); err != nil {
		t.Fatal(err)
	}
	nc.Close()
	s.Close()

	nc = start(t, dir)
	kv, err = OpenKV(ctx, nc, diskOf(t, nc), "functions")
	if err != nil {
		t.Fatal(err)
	}
	events := make(chan Entry, 10)
	stop, err := kv.Watch(ctx, func(e Entry) { events <- e })
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if e := <-events; e.Key != "a.b.ns" || string(e.Value) != "1" {
		t.Fatalf("after a restart the watch begins with %+v", e)
	}
	rev, err := kv.Put(ctx, "a.b.ns", []byte("2"))
	if err != nil {
		t.Fatal(err)
	}
	if e := <-events; string(e.Value) != "2" || e.Revision != rev {
		t.Fatalf("after a put the watch has %+v, want revision %d", e, rev)
	}
	if err := kv.Delete(ctx, "a.b.ns"); err != nil {
		t.Fatal(err)
	}
	if e := <-events; !e.Deleted || e.Key != "a.b.ns" {
		t.Fatalf("after a delete the watch has %+v", e)
	}
	if _, _, err := kv.Get(ctx, "a.b.ns"); !errors.Is(err, ErrNotFound) {
		t.Fatalf("get after delete: %v, want ErrNotFound", err)
	}
}

func TestStopWaitsForTheHandlerOfAClosedConnection(t *testing.T) {
	nc := start(t, t.TempDir())
	b := NewBus(nc)
	began, release := make(chan struct{}), make(chan struct{})
	var events []string
	stop, err := b.Tasks("f", func([]byte, bool) { close(began); <-release; events = append(events, "handled") })
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Submit("f", nil); err != nil {
		t.Fatal(err)
	}
	<-began
	nc.Close()
	go close(release)
	stop()
	events = append(events, "stopped")
	if want := []string{"handled", "stopped"}; !reflect.DeepEqual(events, want) {
		t.Errorf("%v, want %v", events, want)
	}
	stop() // a second stop does nothing
	if _, err := b.Tasks("f", nil); err == nil {
		t.Error("a closed connection subscribes")
	}
}

// TestSyncIntervalReachesTheServer checks that the sync interval reaches the server. The rest is up
// to NATS.
func TestSyncIntervalReachesTheServer(t *testing.T) {
	for wish, want := range map[time.Duration]struct {
		every  time.Duration
		always bool
	}{0: {2 * time.Minute, false}, time.Second: {time.Second, false}, -1: {2 * time.Minute, true}} {
		s, err := StartServer(ServerConfig{Dir: t.TempDir(), Sync: wish, Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		if c := s.ns.JetStreamConfig(); c.SyncInterval != want.every || c.SyncAlways != want.always {
			t.Errorf("sync %v: every %v, always %v, want %+v", wish, c.SyncInterval, c.SyncAlways, want)
		}
		s.Close()
	}
}

// TestRemoveOfMissingMessageIsNoError deletes a message twice, and one that was never there.
func TestRemoveOfMissingMessageIsNoError(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{})
	enter(t, j, "f", "r", "data")
	shard := j.shards[j.shard("r")]
	for _, seq := range []uint64{1, 1, 99} {
		if err := j.remove(shard, seq); err != nil {
			t.Errorf("message %d: %v, want no error", seq, err)
		}
	}
	if _, err := j.load(t.Context(), shard, 1); !errors.Is(err, jetstream.ErrMsgNotFound) {
		t.Errorf("message 1 is loaded: %v, want that it is deleted", err)
	}
}
