package netnstest_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/internal/netnstest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// echo answers lines on a port of a machine until the test ends.
func echo(t *testing.T, l net.Listener) {
	var running sync.WaitGroup
	t.Cleanup(func() { _ = l.Close(); running.Wait() })
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = c.Close() })
			running.Go(func() {
				for s := bufio.NewScanner(c); s.Scan(); {
					_, _ = c.Write(append(s.Bytes(), '\n'))
				}
			})
		}
	})
}

func dial(t *testing.T, from *netnstest.Machine, to string, limit time.Duration) (net.Conn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	c, err := from.Dial(ctx, "tcp", to)
	if err == nil {
		t.Cleanup(func() { _ = c.Close() })
	}
	return c, err
}

// says sends a line and reports whether it comes back within a limit.
func says(t *testing.T, c net.Conn, line string, limit time.Duration) bool {
	t.Helper()
	if _, err := c.Write([]byte(line + "\n")); err != nil {
		t.Fatal(err)
	}
	return hears(t, c, line, limit)
}

func hears(t *testing.T, c net.Conn, line string, limit time.Duration) bool {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(limit)); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, len(line)+1)
	_, err := c.Read(b)
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("a cut must not end connections: %v", err)
	}
	return err == nil && string(b) == line+"\n"
}

// silence is how long a test waits for what must not come.
const silence = 50 * time.Millisecond

// TestCuts cuts links in both directions, in one, and of one port. A connection outlives each cut.
func TestCuts(t *testing.T) {
	n, m := netnstest.New(t, 3)
	for _, at := range m[1:] {
		echo(t, at.Listen(7))
		echo(t, at.Listen(8))
	}
	conns := map[string]net.Conn{}
	for name, at := range map[string]string{"one": m[1].IP + ":7", "other port": m[1].IP + ":8", "other machine": m[2].IP + ":7"} {
		c, err := dial(t, m[0], at, time.Minute)
		if err != nil {
			t.Fatal(err)
		}
		conns[name] = c
		if !says(t, c, "begin", time.Minute) {
			t.Fatalf("%s does not answer", name)
		}
	}
	for name, tc := range map[string]struct {
		cuts []netnstest.Cut
		lost string // connections that the cut holds up
	}{
		"both directions": {netnstest.Between(m[:1], m[1:2]), "one, other port"},
		"one direction":   {[]netnstest.Cut{{From: m[0], To: m[1]}}, "one, other port"},
		"the other":       {[]netnstest.Cut{{From: m[1], To: m[0]}}, "one, other port"},
		"a port":          {[]netnstest.Cut{{From: m[0], To: m[1], Port: 8}}, "other port"},
		"a port, back":    {[]netnstest.Cut{{From: m[1], To: m[0], Port: 8}}, "other port"},
		"a machine":       {netnstest.Between(m[:1], n.Others(m[0])), "one, other port, other machine"},
	} {
		n.Cut(tc.cuts...)
		for which, c := range conns {
			lost := false
			for part := range strings.SplitSeq(tc.lost, ", ") {
				lost = lost || part == which
			}
			limit := time.Minute
			if lost {
				limit = silence
			}
			if says(t, c, name, limit) == lost {
				t.Errorf("cut of %s: the connection %q is cut: %v, want %v", name, which, !lost, lost)
			}
		}
		if c, err := dial(t, n.Clients, m[1].IP+":7", time.Minute); err != nil || !says(t, c, "hello", time.Minute) {
			t.Errorf("cut of %s: clients do not reach the machine: %v", name, err)
		}
		n.Heal()
		for which, c := range conns {
			if strings.Contains(tc.lost, which) && !hears(t, c, name, time.Minute) {
				t.Errorf("cut of %s: the connection %q does not go on", name, which)
			}
		}
	}
}

// TestCutIsSilent dials over a cut: there is no refusal, only silence.
func TestCutIsSilent(t *testing.T) {
	n, m := netnstest.New(t, 2)
	n.Cut(netnstest.Between(m[:1], m[1:])...)
	if _, err := dial(t, m[0], m[1].IP+":7", silence); !isTimeout(err) {
		t.Errorf("dial over a cut: %v, want a timeout", err)
	}
	n.Heal()
	if _, err := dial(t, m[0], m[1].IP+":7", time.Minute); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("dial of a closed port: %v, want a refusal", err)
	}
}

// TestCommand runs a program on a machine, as the process that was started.
func TestCommand(t *testing.T) {
	_, m := netnstest.New(t, 1)
	out, err := m[0].Command("sh", "-c", "cat /proc/net/fib_trie").Output()
	if err != nil || !bytes.Contains(out, []byte(m[0].IP)) {
		t.Errorf("addresses on the machine: %s, %v, want %s", out, err, m[0].IP)
	}
	cmd := m[0].Command("sh", "-c", "echo $$")
	out, err = cmd.Output()
	if err != nil || strings.TrimSpace(string(out)) != strconv.Itoa(cmd.Process.Pid) {
		t.Errorf("process %s, %v, want %d", out, err, cmd.Process.Pid)
	}
}

// isTimeout tells whether a dial ended by its deadline. The network says so in its own way if its
// timer is the first.
func isTimeout(err error) bool {
	var n net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &n) && n.Timeout()
}

// TestFirewall lets connections through to one port, in both directions of their packets, and to no
// other. A process on the machine is found.
func TestFirewall(t *testing.T) {
	_, m := netnstest.New(t, 2)
	open, closed := m[1].Listen(0), m[1].Listen(0)
	echo(t, open)
	echo(t, closed)
	m[1].Allow(uint16(open.Addr().(*net.TCPAddr).Port))
	c, err := dial(t, m[0], open.Addr().String(), 5*time.Second)
	if err != nil || !says(t, c, "x", 5*time.Second) {
		t.Fatalf("the port that is allowed cannot be used: %v", err)
	}
	if _, err := dial(t, m[0], closed.Addr().String(), silence); !errors.Is(err, context.DeadlineExceeded) && !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a port that is not allowed: %v, want no answer", err)
	}
	if _, err := dial(t, m[1], closed.Addr().String(), 5*time.Second); err != nil {
		t.Errorf("the machine cannot reach itself: %v", err)
	}
	cmd := m[0].Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	for deadline := time.Now().Add(5 * time.Second); !slices.Equal(m[0].Processes(), []int{cmd.Process.Pid}); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("processes %v, want %d", m[0].Processes(), cmd.Process.Pid)
		}
	}
	if others := m[1].Processes(); len(others) > 0 {
		t.Errorf("processes %v on the other machine", others)
	}
}
