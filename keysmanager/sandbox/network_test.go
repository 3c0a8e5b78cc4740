package sandbox

import (
	"os"
	"strconv"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// TestProcessStartsInItsNetworkNamespace checks that a process starts in the network namespace that
// it is given, and that the next process starts in the namespace of this process again.
func TestProcessStartsInItsNetworkNamespace(t *testing.T) {
	if os.Getuid() != 0 {
		if os.Getenv("CI") == "true" {
			t.Fatal("needs root")
		}
		t.Skip("needs root")
	}
	var network *os.File
	var err error
	onThread(func() {
		if err = unix.Unshare(unix.CLONE_NEWNET); err == nil {
			network, err = os.Open("/proc/thread-self/ns/net")
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer network.Close()
	s := NewSpawner()
	defer s.Close()
	in := func(file *os.File) string {
		t.Helper()
		cmd, err := s.Start(t.Context(), Command{Dir: "/", Argv: []string{"sleep", "60"}, Network: file})
		if err != nil {
			t.Fatal(err)
		}
		name, err := os.Readlink("/proc/" + strconv.Itoa(cmd.PID()) + "/ns/net")
		if err != nil {
			t.Error(err)
		}
		_ = cmd.Signal(syscall.SIGKILL)
		cmd.Wait()
		return name
	}
	want, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(network.Fd())))
	if err != nil {
		t.Fatal(err)
	}
	if got := in(network); got != want {
		t.Errorf("it is in %s, want %s", got, want)
	}
	ours, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if got := in(nil); got != ours {
		t.Errorf("the next process is in %s, want %s", got, ours)
	}
}
