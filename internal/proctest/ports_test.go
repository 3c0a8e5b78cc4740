package proctest

import (
	"fmt"
	"net"
	"slices"
	"testing"
)

// TestPorts checks that a port is given to one test at a time, and never while a process listens.
func TestPorts(t *testing.T) {
	var ports []int
	t.Run("a test", func(t *testing.T) {
		ports = Ports(t, 100)
		for _, port := range ports {
			if reserve(t, port) {
				t.Errorf("port %d is given twice", port)
			}
		}
		slices.Sort(ports)
		if len(slices.Compact(slices.Clone(ports))) != 100 {
			t.Errorf("ports %v, want 100 different ones", ports)
		}
	})
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", ports[0]))
	if err != nil {
		t.Fatalf("a port that was given: %v", err)
	}
	if reserve(t, ports[0]) {
		t.Error("a port on which a process listens is given")
	}
	_ = l.Close()
	if !reserve(t, ports[0]) {
		t.Error("a port of a test that has ended is not free again")
	}
}
