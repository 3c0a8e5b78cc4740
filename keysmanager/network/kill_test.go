package network

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// child runs in this test binary as a child process. It opens networks of an owner, creates one for
// a replica, prints its descriptor and gateway, and waits for its end.
func child(owner string) {
	n, err := Open(Config{CIDR: replicas, Run: os.Getenv("NETWORK_TEST_RUN"), Owner: owner, Log: slog.New(slog.DiscardHandler)})
	if errors.Is(err, ErrUnavailable) {
		fmt.Println("unavailable:", err)
		return
	}
	if err != nil {
		fmt.Println("open:", err)
		return
	}
	err = n.Admit(netip.AddrPortFrom(n.Gateway(), 7))
	ns, errCreate := n.Create()
	if err := errors.Join(err, errCreate); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(ns.Fd(), n.Gateway())
	_, _ = io.Copy(io.Discard, os.Stdin) // until the test ends
}

// startChild starts a child in the machine and returns what it prints.
func (m *testMachine) startChild(owner string, as *syscall.Credential) (*exec.Cmd, string) {
	m.t.Helper()
	cmd := exec.CommandContext(m.t.Context(), "/proc/self/exe")
	cmd.Env = append(os.Environ(), "NETWORK_TEST_CHILD="+owner, "NETWORK_TEST_RUN="+m.run)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: as}
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	check(m.t, err)
	stdout, err := cmd.StdoutPipe()
	check(m.t, err)
	check(m.t, cmd.Start()) // in this thread's namespace
	m.t.Cleanup(func() { stdin.Close(); _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		m.t.Fatalf("child says %q, %v", line, err)
	}
	return cmd, strings.TrimSpace(line)
}

// killedChild kills a child that has opened networks. It returns the namespace of its replica,
// which still lives, and the gateway.
func (m *testMachine) killedChild(owner string) (*os.File, netip.Addr) {
	m.t.Helper()
	cmd, line := m.startChild(owner, nil)
	var fd int
	var gateway string
	if n, err := fmt.Sscan(line, &fd, &gateway); n != 2 {
		m.t.Fatalf("child says %q, %v, want a descriptor and an address", line, err)
	}
	ns, err := os.Open(fmt.Sprintf("/proc/%d/fd/%d", cmd.Process.Pid, fd))
	check(m.t, err)
	check(m.t, cmd.Process.Signal(unix.SIGKILL))
	_ = cmd.Wait() // killed
	m.t.Cleanup(func() { ns.Close() })
	return ns, netip.MustParseAddr(gateway)
}

func TestNextProcessOfTheOwnerAdoptsReplicas(t *testing.T) {
	m := newMachine(t)
	ns, gateway := m.killedChild("a")
	m.serve(m.home, ":7")
	c, err := m.dial(ns, "tcp", routerAddr+":7")
	check(t, err)
	inward, err := m.dial(ns, "tcp", netip.AddrPortFrom(gateway, 7).String())
	check(t, err)
	other := m.open("b")
	n := m.open("a")
	if n.Gateway() != gateway || other.Gateway() == gateway {
		t.Errorf("gateways %v of the owner and %v of another, want %v for the owner", n.Gateway(), other.Gateway(), gateway)
	}
	for i := range 2 {
		if got, err := say(c, "still"); err != nil || got != machineAddr+" still" {
			t.Errorf("answer %q, %v of a connection from before", got, err)
		}
		if got, err := say(inward, "still"); err != nil || got != m.eth0(ns)+" still" {
			t.Errorf("answer %q, %v of the gateway", got, err)
		}
		if i == 0 {
			check(t, n.Admit(netip.AddrPortFrom(gateway, 8)))
		}
	}
	second := m.create(n)
	m.wantAnswer(second, "tcp", routerAddr+":7", machineAddr)
	m.wantRefused(second, "tcp", m.eth0(ns)+":7")
	c.Close()
	inward.Close()
	check(t, other.Close())
	if got := m.forwarding(); got != "1" {
		t.Errorf("forwarding is %s while one is open, want 1", got)
	}
	check(t, n.Close())
	m.wantClean()
	if got := m.forwarding(); got != "0" {
		t.Errorf("forwarding is %s at the end, want 0 as before", got)
	}
}

func TestNetworksOfDeadOwnersAreRemoved(t *testing.T) {
	m := newMachine(t)
	ns, gateway := m.killedChild("a")
	if n := m.open("b"); n.Gateway() == gateway {
		t.Errorf("gateway %v is that of a living replica", gateway)
	} else {
		m.wantAnswer(ns, "tcp", routerAddr+":7", machineAddr) // the replica still has its way out
		check(t, n.Close())
	}
	if got := m.forwarding(); got != "1" {
		t.Errorf("forwarding is %s while a replica lives, want 1", got)
	}
	gone := m.awaitEnd(m.eth0(ns))
	ns.Close()
	gone()
	n := m.open("b")
	if n.Gateway() != gateway {
		t.Errorf("gateway %v, want %v, which nobody has any more", n.Gateway(), gateway)
	}
	check(t, n.Close())
	m.wantClean()
	if got := m.forwarding(); got != "0" {
		t.Errorf("forwarding is %s at the end, want 0 as before", got)
	}
}

func TestWithoutRootThereAreNoNetworks(t *testing.T) {
	m := newMachine(t)
	_, line := m.startChild("a", &syscall.Credential{Uid: 65534, Gid: 65534})
	if want := "unavailable: " + ErrUnavailable.Error() + ": this process is not root"; line != want {
		t.Errorf("a user's process says %q, want %q", line, want)
	}
}
