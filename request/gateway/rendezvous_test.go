package gateway

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// TestSourceReplaysBody checks that a body can be read again from its start while it is kept.
func TestSourceReplaysBody(t *testing.T) {
	t.Parallel()
	s := &source{mu: newGate(), r: strings.NewReader("abcdef"), keep: 4}
	first := s.again(nil)
	two := make([]byte, 2)
	for range 2 {
		if _, err := io.ReadFull(first, two); err != nil {
			t.Fatal(err)
		}
	}
	_ = first.Close()
	if _, err := first.Read(two); !errors.Is(err, http.ErrBodyReadAfterClose) {
		t.Errorf("a closed reading: %v", err)
	}
	if sent, lost, err := s.state(); sent != 4 || lost || err != nil {
		t.Errorf("%d, %t, %v, want 4 bytes that can be read again", sent, lost, err)
	}
	if b, err := io.ReadAll(s.again(nil)); string(b) != "abcdef" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	if sent, lost, err := s.state(); sent != 6 || !lost || err != nil {
		t.Errorf("%d, %t, %v, want all 6 bytes, which are too many", sent, lost, err)
	}
}

// TestReplicaMeetsOnlyItsRequest checks that a replica meets its own request only, and that unknown
// tokens, late replicas and replicas of a closed gateway are turned away.
func TestReplicaMeetsOnlyItsRequest(t *testing.T) {
	t.Parallel()
	v, err := NewRendezvous(t.TempDir(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer v.Close()
	gone := func(what string, c io.ReadCloser) {
		t.Helper()
		if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, io.EOF) && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: %d bytes, %v, want the end", what, n, err)
		}
		_ = c.Close()
	}
	m, other := v.meet(), v.meet()
	defer other.close()
	for what, greeting := range map[string]string{
		"a stranger": strings.Repeat("A", tokenSize) + "\n", "an unfinished token": m.token[:4] + "\n" + m.token + "\n", "no line": m.token + "x",
	} {
		gone(what, dial(t, v, greeting))
	}
	c := dial(t, v, m.token+"\nhello")
	met := <-m.conns
	b := make([]byte, 5)
	if _, err := io.ReadFull(met, b); string(b) != "hello" || err != nil {
		t.Errorf("%q, %v", b, err)
	}
	if len(other.conns) != 0 {
		t.Error("somebody else's replica came")
	}
	_ = met.Close()
	gone("a met one that is left", c)
	early := dial(t, v, m.token+"\n")
	m.conns <- <-m.conns // it was greeted
	m.close()
	gone("one that nobody meets any more", early)
	gone("a late one", dial(t, v, m.token+"\n"))
	silent := dial(t, v, "")
	done := make(chan struct{})
	go func() { v.Close(); close(done) }()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("Close waits for one who says nothing")
	}
	gone("one of a closed gateway", silent)
	if _, err := os.Stat(v.path); !os.IsNotExist(err) {
		t.Errorf("the socket is still there: %v", err)
	}
}

// TestReplicaMayPauseBeforeItsToken checks that a replica may pause between its dial and its token.
func TestReplicaMayPauseBeforeItsToken(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		v := &Rendezvous{waiting: map[string]*meeting{}, greeting: map[net.Conn]struct{}{}}
		m := v.meet()
		defer m.close()
		near, far := net.Pipe()
		defer far.Close()
		if !v.begin(near, false) {
			t.Fatal("it is sent away")
		}
		go v.greet(near)
		time.Sleep(50 * time.Second)
		_, _ = io.WriteString(far, m.token+"\n")
		synctest.Wait()
		if len(m.conns) != 1 {
			t.Error("it was not met")
		}
	})
}

func dial(t *testing.T, v *Rendezvous, greeting string) net.Conn {
	t.Helper()
	c, err := net.Dial("unix", v.path)
	if err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, greeting); err != nil {
		t.Fatal(err)
	}
	return c
}
