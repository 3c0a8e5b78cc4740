package queue

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("JOURNAL_WRITER"); dir != "" {
		writeJournal(dir)
	}
	goleak.VerifyTestMain(m)
}

func start(t *testing.T, dir string) *nats.Conn {
	t.Helper()
	s, err := StartServer(dir, slog.New(slog.DiscardHandler))
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
	return nc
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

func TestKVWatchSeesWhatWasThereAndWhatChanges(t *testing.T) {
	ctx := t.Context()
	dir := t.TempDir()
	s, err := StartServer(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	nc, err := s.Connect("first")
	if err != nil {
		t.Fatal(err)
	}
	kv, err := OpenKV(ctx, nc, "functions")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Put(ctx, "a.b.ns", []byte("1")); err != nil {
		t.Fatal(err)
	}
	nc.Close()
	s.Close()

	kv, err = OpenKV(ctx, start(t, dir), "functions")
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

func openJournal(t *testing.T, nc *nats.Conn, cfg JournalConfig) *Journal {
	t.Helper()
	j, err := OpenJournal(t.Context(), nc, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return j
}

func TestJournalRetriesThenBuries(t *testing.T) {
	nc := start(t, t.TempDir())
	j := openJournal(t, nc, JournalConfig{Attempts: 3, Backoff: time.Millisecond})
	if err := j.Append(t.Context(), "good.1", []byte("x")); err != nil {
		t.Fatal(err)
	}
	if err := j.Append(t.Context(), "bad", []byte("x")); err != nil {
		t.Fatal(err)
	}
	dead, err := nc.SubscribeSync("dead.*")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	seen := map[string][]int{}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- j.Run(ctx, func(_ context.Context, r Record) error {
			mu.Lock()
			defer mu.Unlock()
			seen[r.ID] = append(seen[r.ID], r.Attempt)
			if r.ID == "bad" {
				return errors.New("no luck")
			}
			return nil
		})
	}()
	m, err := dead.NextMsg(10 * time.Second)
	if err != nil {
		t.Fatal(err)
	}
	if c := m.Header.Get("Cause"); !strings.Contains(c, "attempt 3 of 3: no luck") {
		t.Errorf("cause %q", c)
	}
	cancel()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if got := seen["bad"]; !slices.Equal(got, []int{1, 2, 3}) {
		t.Errorf("attempts of the bad record: %v, want 1 2 3", got)
	}
	if got := seen["good.1"]; !slices.Equal(got, []int{1}) {
		t.Errorf("attempts of the good record: %v, want 1", got)
	}
}

func TestJournalRefusesWhatDoesNotFit(t *testing.T) {
	j := openJournal(t, start(t, t.TempDir()), JournalConfig{Shards: 1, Bytes: 64 << 10})
	var err error
	for i := 0; err == nil && i < 10; i++ {
		err = j.Append(t.Context(), fmt.Sprint(i), make([]byte, 16<<10))
	}
	if err == nil || !strings.Contains(err.Error(), "maximum bytes") {
		t.Fatalf("a full journal answers %v", err)
	}
}

// writeJournal is a process of its own: it appends records and prints each id once Append has returned, until it is killed.
func writeJournal(dir string) {
	ctx := context.Background()
	s, err := StartServer(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		panic(err)
	}
	nc, err := s.Connect("writer")
	if err != nil {
		panic(err)
	}
	j, err := OpenJournal(ctx, nc, JournalConfig{}, slog.New(slog.DiscardHandler))
	if err != nil {
		panic(err)
	}
	for i := range 1_000_000 {
		id := fmt.Sprintf("call-%d", i)
		if err := j.Append(ctx, id, []byte(id)); err != nil {
			panic(err)
		}
		fmt.Println(id)
	}
	os.Exit(3)
}

func TestJournalSurvivesKill(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), "JOURNAL_WRITER="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	accepted := map[string]bool{}
	for sc := bufio.NewScanner(out); sc.Scan(); {
		accepted[sc.Text()] = true
		if len(accepted) == 500 {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	_ = cmd.Wait() // killed
	if len(accepted) < 500 {
		t.Fatalf("the writer ended by itself after %d records", len(accepted))
	}

	j := openJournal(t, start(t, dir), JournalConfig{})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	var mu sync.Mutex
	if err := j.Run(ctx, func(_ context.Context, r Record) error {
		mu.Lock()
		defer mu.Unlock()
		delete(accepted, r.ID)
		if len(accepted) == 0 {
			cancel()
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if len(accepted) > 0 {
		t.Fatalf("%d accepted records are gone", len(accepted))
	}
}

func BenchmarkBusRoundTrip(b *testing.B) {
	s, err := StartServer(b.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	nc, err := s.Connect("bench")
	if err != nil {
		b.Fatal(err)
	}
	defer nc.Close()
	bus := NewBus(nc)
	got := make(chan struct{}, 1)
	inbox, stop, err := bus.Inbox(func([]byte) { got <- struct{}{} })
	if err != nil {
		b.Fatal(err)
	}
	defer stop()
	stopTasks, err := bus.Tasks("f", func(m []byte, _ bool) { _ = bus.Reply(inbox, m) })
	if err != nil {
		b.Fatal(err)
	}
	defer stopTasks()
	msg := make([]byte, 200)
	for b.Loop() {
		if err := bus.Submit("f", msg); err != nil {
			b.Fatal(err)
		}
		<-got
	}
}
