package queue

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// TestDiskFull has a disk that others have nearly filled: what comes is refused at once with nothing left of it, what was
// accepted is retried, told and done, a restart is possible, and with room again requests are accepted again.
func TestDiskFull(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to have a small disk")
	}
	small := t.TempDir()
	if err := unix.Mount("tmpfs", small, "tmpfs", 0, "size=128m"); err != nil {
		t.Skipf("needs the right to mount: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(small, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	cfg := JournalConfig{Blobs: filepath.Join(small, "blobs")}
	nc := start(t, filepath.Join(small, "nats"))
	j := openJournal(t, nc, cfg)
	for i := range 100 {
		enter(t, j, "f", fmt.Sprint("r", i), strings.Repeat("x", 1000))
	}
	large := strings.Repeat("y", 2*blobAbove)
	enter(t, j, "f", "large", large)

	ballast := filepath.Join(small, "ballast")
	if err := os.WriteFile(ballast, make([]byte, 128<<20-diskReserve-1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, data := range []string{"x", large} {
		if err := j.Append("f", "refused", []byte(data)); !errors.Is(err, ErrFull) || !strings.Contains(err.Error(), small) {
			t.Fatalf("%d bytes on a full disk: %v, want ErrFull and the disk's name", len(data), err)
		}
	}
	if files, err := os.ReadDir(cfg.Blobs); err != nil || len(files) != 1 {
		t.Errorf("files %v, %v, want that of the large record", files, err)
	}
	j = openJournal(t, nc, cfg)
	var mu sync.Mutex
	done := map[string]int{}
	work(t, j, func(_ context.Context, r Record) End {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case r.Kind == Callback:
			done[r.ID]++
			return End{}
		case r.Attempt == 1:
			return End{Err: errors.New("again"), Again: true}
		default:
			return End{Callback: r.Data, To: "host"}
		}
	})
	empty(t, j)
	if n := len(letters(t, j)); len(done) != 101 || n != 0 {
		t.Errorf("%d told and %d dead letters, want 101 and none", len(done), n)
	}
	if err := os.Remove(ballast); err != nil {
		t.Fatal(err)
	}
	enter(t, j, "f", "small again", "x")
	enter(t, j, "f", "large again", large)
	empty(t, j)
}
