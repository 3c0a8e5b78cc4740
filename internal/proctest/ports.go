package proctest

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"testing"
)

// Ports returns n ports of this machine that nothing listens on. Until the test ends, no other test
// gets them, and the kernel gives them to no socket that asks for any port. So a process can take
// its port later, or again after a restart.
func Ports(t testing.TB, n int) []int {
	t.Helper()
	const first = 12_000
	var last, end int // of the ports that the kernel gives to sockets that ask for any
	b, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err == nil {
		_, err = fmt.Sscan(string(b), &last, &end)
	}
	if err != nil || last-first < 1000 {
		t.Fatalf("ports below those of the kernel: %v, %q, want 1000 from %d on", err, b, first)
	}
	var out []int
	for _, i := range rand.Perm(last - first) {
		if len(out) == n {
			return out
		}
		if port := first + i; reserve(t, port) {
			out = append(out, port)
		}
	}
	t.Fatalf("%d free ports of %d that are wanted", len(out), n)
	return nil
}

// reserve reserves a port until the test ends, unless another test has it or a process listens on
// it. The reservation is an abstract socket, which ends with this process.
func reserve(t testing.TB, port int) bool {
	t.Helper()
	mine, err := net.Listen("unix", fmt.Sprintf("@stagecoach-test-port-%d", port))
	if err != nil {
		return false
	}
	l, err := net.Listen("tcp", fmt.Sprintf(":%d", port)) // on all addresses
	if err != nil {
		_ = mine.Close()
		return false
	}
	_ = l.Close()
	t.Cleanup(func() { _ = mine.Close() })
	return true
}
