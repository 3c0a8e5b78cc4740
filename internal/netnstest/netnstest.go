// Package netnstest gives tests several machines: network namespaces that a switch joins. Tests run
// processes on them, and cut the links between them. Nothing on the real machine changes. The
// kernel removes the namespaces with the last process in them, even if the test is killed.
package netnstest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// prefix is the beginning of all addresses. The namespaces have no way out, so no network of the
// real machine can be the same.
const prefix = "10.98.0."

// Net is a switch and the machines that it joins. Its methods are for one goroutine.
type Net struct {
	// Clients is a machine that no cut affects. Tests connect to the others from it.
	Clients *Machine

	t    testing.TB
	all  []*Machine
	cuts map[Cut]bool
}

// Machine is a network namespace.
type Machine struct {
	IP string

	t    testing.TB
	ns   *os.File
	cut  *nftables.Chain // drops packets that arrive
	wall *nftables.Chain // see Allow
}

// New makes machines until the end of the test. Without root, it skips the test, or fails it if
// CI=true.
func New(t testing.TB, machines int) (n *Net, all []*Machine) {
	t.Helper()
	n = &Net{t: t, cuts: map[Cut]bool{}}
	var err error
	if n.Clients, err = newMachine(t, prefix+"1"); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatalf("make a network namespace: %v; want root", err)
		}
		t.Skipf("needs root, to make network namespaces: %v", err)
	}
	n.check(n.Clients.setUp("lan", func(h *netlink.Handle) error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "lan"
		return h.LinkAdd(&netlink.Bridge{LinkAttrs: attrs})
	}))
	for i := range machines {
		m, err := newMachine(t, prefix+strconv.Itoa(i+2))
		n.check(err)
		n.check(n.Clients.enter(func() error { return plug(m, "port"+strconv.Itoa(i)) }))
		n.check(m.setUp("eth0", nil))
		n.check(m.filter())
		n.all = append(n.all, m)
	}
	return n, n.all
}

func (n *Net) check(err error) {
	n.t.Helper()
	if err != nil {
		n.t.Fatal(err)
	}
}

// newMachine makes a namespace without links.
func newMachine(t testing.TB, ip string) (*Machine, error) {
	m := &Machine{IP: ip, t: t}
	err := onThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		m.ns, err = os.Open("/proc/thread-self/ns/net")
		return err
	})
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { _ = m.ns.Close() })
	return m, nil
}

// onThread runs f on a thread that may change its namespace. The thread goes back to its namespace
// and does not end: a process with Pdeathsig may have been started from it.
func onThread(f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err == nil {
			err = f()
			if back := unix.Setns(int(home.Fd()), unix.CLONE_NEWNET); back != nil {
				panic("netnstest: a thread cannot go back to its namespace: " + back.Error())
			}
			_ = home.Close()
		}
		runtime.UnlockOSThread()
		result <- err
	}()
	return <-result
}

// enter runs f on a thread in the machine's namespace. A socket that f opens stays there.
func (m *Machine) enter(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(m.ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// setUp gives the machine's address to a link, after an optional function has made it.
func (m *Machine) setUp(link string, first func(*netlink.Handle) error) error {
	return m.enter(func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		if first != nil {
			if err := first(h); err != nil {
				return err
			}
		}
		for _, name := range []string{"lo", link} {
			l, err := h.LinkByName(name)
			if err != nil {
				return fmt.Errorf("link %s: %w", name, err)
			}
			if err := h.LinkSetUp(l); err != nil {
				return err
			}
			if name == link {
				if err := h.AddrAdd(l, &netlink.Addr{IPNet: &net.IPNet{IP: net.ParseIP(m.IP).To4(), Mask: net.CIDRMask(24, 32)}}); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// plug connects a machine to the switch. The thread is in the namespace of the switch.
func plug(m *Machine, port string) error {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	lan, err := h.LinkByName("lan")
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MasterIndex = port, lan.Attrs().Index
	cable := netlink.NewVeth(attrs)
	cable.PeerName, cable.PeerNamespace = "eth0", netlink.NsFd(int(m.ns.Fd()))
	return errors.Join(h.LinkAdd(cable), h.LinkSetUp(cable))
}

// Namespace returns a path of the machine's namespace.
func (m *Machine) Namespace() string { return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), m.ns.Fd()) }

// Command returns a program that will run on the machine, as the process that is started.
func (m *Machine) Command(program string, args ...string) *exec.Cmd {
	args = append([]string{"--net=" + m.Namespace(), program}, args...)
	return exec.Command("nsenter", args...) //nolint:noctx // the caller ends it
}

// Dial connects to an address from the machine. It is a net.Dialer's DialContext.
func (m *Machine) Dial(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = m.enter(func() (err error) { c, err = (&net.Dialer{}).DialContext(ctx, network, address); return err })
	return c, err
}

// Listen listens on a port of the machine. 0: any port.
func (m *Machine) Listen(port int) net.Listener {
	m.t.Helper()
	var l net.Listener
	err := m.enter(func() (err error) {
		l, err = net.Listen("tcp4", net.JoinHostPort(m.IP, strconv.Itoa(port)))
		return err
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return l
}

// Processes returns the processes on the machine, except for those that have left its namespace.
func (m *Machine) Processes() (pids []int) {
	m.t.Helper()
	home, err := m.ns.Stat()
	if err != nil {
		m.t.Fatal(err)
	}
	all, err := os.ReadDir("/proc")
	if err != nil {
		m.t.Fatal(err)
	}
	for _, e := range all {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		// Stat fails if the process has ended.
		if at, err := os.Stat(fmt.Sprintf("/proc/%d/ns/net", pid)); err == nil && os.SameFile(home, at) {
			pids = append(pids, pid)
		}
	}
	return pids
}
