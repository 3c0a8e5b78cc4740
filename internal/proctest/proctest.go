// Package proctest is for tests that deal with foreign processes, which send no events to wait for: the one place where
// tests poll, always with a deadline.
package proctest

import (
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
	"time"
)

// Until polls done until it is true, and fails the test after limit.
func Until(t testing.TB, limit time.Duration, what string, done func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(limit)
	for !done() {
		select {
		case <-tick.C:
		case <-deadline:
			t.Fatalf("after %v still waiting: %s", limit, what)
		}
	}
}

// Gone waits until no process has this pid.
func Gone(t testing.TB, pid int) {
	t.Helper()
	Until(t, 10*time.Second, "process to be gone", func() bool {
		return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH)
	})
}

// Built returns the path of something that `make images` or `make fetch` puts under build/. Where it is missing the test is
// skipped, and with CI=true it fails.
func Built(t testing.TB, path ...string) string {
	t.Helper()
	_, here, _, _ := runtime.Caller(0)
	full := filepath.Join(append([]string{filepath.Dir(here), "..", "..", "build"}, path...)...)
	if _, err := os.Stat(full); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("%v: run make images first", err)
		}
		t.Skipf("%v: run make images first", err)
	}
	return full
}
