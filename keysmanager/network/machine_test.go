package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// The main goroutine keeps the process's first thread, so that no test changes that thread's
// namespace.
func init() { runtime.LockOSThread() }

func TestMain(m *testing.M) {
	if owner := os.Getenv("NETWORK_TEST_CHILD"); owner != "" {
		child(owner)
		return
	}
	goleak.VerifyTestMain(m)
}

// patience bounds events that normally take milliseconds.
const patience = time.Minute

var replicas = netip.MustParsePrefix("10.231.0.0/16")

// testMachine is a fake machine: a network namespace whose only way out leads to another one, the
// outside.
type testMachine struct {
	t       testing.TB
	run     string
	home    *os.File
	outside *os.File
	netlink *netlink.Handle
	log     *log
}

// log keeps what is logged.
type log struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *log) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// The test's networks.
const (
	machineMTU  = 1400
	machineAddr = "192.0.2.2"
	routerAddr  = "192.0.2.1"
	farAddr     = "198.51.100.1" // behind the router
	metadata    = "169.254.169.254"
)

// newMachine moves the test's thread into a fake machine. The outside answers on port 7 of all its
// addresses.
func newMachine(t testing.TB) *testMachine {
	t.Helper()
	if err := possible(); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	runtime.LockOSThread() // never unlocked: the thread ends with the test
	m := &testMachine{t: t, run: filepath.Join(t.TempDir(), "run"), log: &log{}}
	home, h, err := newNamespace()
	check(t, err)
	m.home, m.netlink = home, h
	// Without icmp_ratelimit 0, the kernel would send at most one refusal per second.
	for _, s := range [][2]string{{forwardKey, "0"}, {"net/ipv6/conf/default/disable_ipv6", "0"}, {"net/ipv4/icmp_ratelimit", "0"}} {
		check(t, setSysctl(s[0], s[1]))
	}
	m.outside, err = Lonely()
	check(t, err)
	t.Cleanup(func() { h.Close(); m.home.Close(); m.outside.Close() })

	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "up0", machineMTU
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerNamespace = "eth0", netlink.NsFd(int(m.outside.Fd()))
	check(t, h.LinkAdd(veth))
	check(t, h.AddrAdd(veth, cidr(t, machineAddr+"/24")))
	check(t, h.LinkSetUp(veth))
	check(t, enter(m.outside, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		eth0, err := h.LinkByName("eth0")
		if err != nil {
			return err
		}
		for _, a := range []string{farAddr + "/32", metadata + "/32", "10.231.77.7/32"} {
			if err := h.AddrAdd(loopback, cidr(t, a)); err != nil {
				return err
			}
		}
		return errors.Join(h.AddrAdd(eth0, cidr(t, routerAddr+"/24")), h.LinkSetUp(eth0))
	}))
	_, everywhere, _ := net.ParseCIDR("0.0.0.0/0")
	check(t, h.RouteAdd(&netlink.Route{LinkIndex: veth.Index, Dst: everywhere, Gw: net.ParseIP(routerAddr)}))
	m.serve(m.outside, ":7")
	return m
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func cidr(t testing.TB, s string) *netlink.Addr {
	t.Helper()
	a, err := netlink.ParseAddr(s)
	check(t, err)
	return a
}

// enter runs f in a namespace.
func enter(ns *os.File, f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		return f()
	})
}

// serve answers over TCP and UDP until the test ends. An answer has the peer's address and what the
// peer sent.
func (m *testMachine) serve(ns *os.File, at string) {
	m.t.Helper()
	var tcp net.Listener
	var udp net.PacketConn
	check(m.t, enter(ns, func() (err error) {
		if tcp, err = net.Listen("tcp4", at); err != nil {
			return err
		}
		udp, err = net.ListenPacket("udp4", at)
		return err
	}))
	var running sync.WaitGroup
	m.t.Cleanup(func() { udp.Close(); running.Wait() })
	running.Go(func() {
		b := make([]byte, 1500)
		for {
			n, from, err := udp.ReadFrom(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			_, _ = udp.WriteTo(fmt.Appendf(nil, "%v %s", from.(*net.UDPAddr).IP, b[:n]), from)
		}
	})
	m.serveTCP(tcp)
}

func (m *testMachine) serveTCP(tcp net.Listener) {
	var running sync.WaitGroup
	m.t.Cleanup(func() { tcp.Close(); running.Wait() })
	running.Go(func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(patience))
				for b := make([]byte, 1500); ; {
					n, err := c.Read(b)
					if err != nil {
						return
					}
					fmt.Fprintf(c, "%v %s", c.RemoteAddr().(*net.TCPAddr).IP, b[:n])
				}
			})
		}
	})
}

// open opens networks of an owner in the machine, and closes them when the test ends.
func (m *testMachine) open(owner string, change ...func(*Config)) *Networks {
	m.t.Helper()
	n, err := m.try(owner, change...)
	check(m.t, err)
	m.t.Cleanup(func() { check(m.t, n.Close()) })
	return n
}

func (m *testMachine) try(owner string, change ...func(*Config)) (*Networks, error) {
	c := Config{CIDR: replicas, Run: m.run, Owner: owner, Log: slog.New(slog.NewTextHandler(m.log, nil)), resolvConf: filepath.Join(m.run, "..", "resolv.conf")}
	for _, f := range change {
		f(&c)
	}
	return Open(c)
}

// resolvConf writes the machine's resolv.conf.
func (m *testMachine) resolvConf(text string) {
	m.t.Helper()
	check(m.t, replaceFile(filepath.Join(m.run, "..", "resolv.conf"), []byte(text), 0o644))
}

// create creates a replica's namespace, which ends with the test.
func (m *testMachine) create(n *Networks) *os.File {
	m.t.Helper()
	ns, err := n.Create()
	check(m.t, err)
	m.t.Cleanup(func() { ns.Close() })
	return ns
}

// dial connects from a namespace.
func (m *testMachine) dial(ns *os.File, network, addr string) (net.Conn, error) {
	m.t.Helper()
	var c net.Conn
	err := enter(ns, func() (err error) {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		c, err = (&net.Dialer{}).DialContext(ctx, network, addr)
		return err
	})
	if err == nil {
		m.t.Cleanup(func() { c.Close() })
		_ = c.SetDeadline(time.Now().Add(patience))
	}
	return c, err
}

// ask sends "hello" from a namespace and returns the answer.
func (m *testMachine) ask(ns *os.File, network, addr string) (string, error) {
	m.t.Helper()
	c, err := m.dial(ns, network, addr)
	if err != nil {
		return "", err
	}
	defer c.Close()
	return say(c, "hello")
}

func say(c net.Conn, text string) (string, error) {
	if _, err := io.WriteString(c, text); err != nil {
		return "", err
	}
	b := make([]byte, 1500)
	n, err := c.Read(b)
	return string(b[:n]), err
}

// wantAnswer checks that a namespace reaches an address, and that the receiver sees the right
// sender.
func (m *testMachine) wantAnswer(ns *os.File, network, addr, as string) {
	m.t.Helper()
	if got, err := m.ask(ns, network, addr); err != nil || got != as+" hello" {
		m.t.Errorf("%s %s answers %q, %v, want to be seen as %s", network, addr, got, err, as)
	}
}

// wantRefused checks that an address refuses a namespace explicitly, instead of dropping its
// packets.
func (m *testMachine) wantRefused(ns *os.File, network, addr string) {
	m.t.Helper()
	got, err := m.ask(ns, network, addr)
	if err == nil {
		m.t.Errorf("%s %s answers %q, want it refused", network, addr, got)
	} else if ne := net.Error(nil); errors.As(err, &ne) && ne.Timeout() {
		m.t.Errorf("%s %s: %v, want an answer that refuses", network, addr, err)
	}
}

// eth0 returns the address of a replica.
func (m *testMachine) eth0(ns *os.File) string {
	m.t.Helper()
	var out string
	check(m.t, enter(ns, func() error {
		l, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		addrs, err := l.Addrs()
		if err != nil || len(addrs) != 1 {
			return fmt.Errorf("addresses %v of eth0, %w, want one", addrs, err)
		}
		out, _, _ = strings.Cut(addrs[0].String(), "/")
		return nil
	}))
	return out
}

// links lists the links of replicas.
func (m *testMachine) links() []string {
	m.t.Helper()
	all, err := dump(m.netlink.LinkList)
	check(m.t, err)
	var out []string
	for _, l := range all {
		if strings.HasPrefix(l.Attrs().Name, prefix) {
			out = append(out, l.Attrs().Name)
		}
	}
	return out
}

// forwarding returns the machine's net.ipv4.ip_forward.
func (m *testMachine) forwarding() string {
	m.t.Helper()
	b, err := os.ReadFile("/proc/sys/" + forwardKey)
	check(m.t, err)
	return strings.TrimSpace(string(b))
}

// serve6 answers TCP over IPv6 as serve does.
func (m *testMachine) serve6(ns *os.File, at string) {
	m.t.Helper()
	var tcp net.Listener
	check(m.t, enter(ns, func() (err error) {
		tcp, err = net.Listen("tcp6", at)
		return err
	}))
	m.serveTCP(tcp)
}

// wantSilence checks that no packet comes back from an address. It waits for a moment, because
// there is no event for a dropped packet.
func (m *testMachine) wantSilence(ns *os.File, network, addr string) {
	m.t.Helper()
	err := enter(ns, func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
		defer cancel()
		c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
		if err == nil {
			c.Close()
		}
		return err
	})
	if e := net.Error(nil); !errors.As(err, &e) || !e.Timeout() {
		m.t.Errorf("%s %s: %v, want silence", network, addr, err)
	}
}

// wantClean checks that the machine has nothing of Stagecoach.
func (m *testMachine) wantClean() {
	m.t.Helper()
	if l := m.links(); len(l) > 0 {
		m.t.Errorf("links %v are left", l)
	}
	conn, err := nftables.New(nftables.WithNetNSFd(int(m.home.Fd())))
	check(m.t, err)
	if all, err := conn.ListTables(); err != nil || len(all) > 0 {
		m.t.Errorf("%d tables are left, %v", len(all), err)
	}
	addrs, err := dump(func() ([]netlink.Addr, error) { return m.netlink.AddrList(loopback, netlink.FAMILY_V4) })
	check(m.t, err)
	if len(addrs) != 1 {
		m.t.Errorf("addresses %v of the loopback link, want one", addrs)
	}
	entries, err := os.ReadDir(filepath.Join(m.run, "networks"))
	check(m.t, err)
	for _, e := range entries {
		if e.Name() != "lock" && e.Name() != "addresses" {
			m.t.Errorf("file %s is left", e.Name())
		}
	}
}

// awaitEnd watches the machine's links. The returned function waits until the link of a replica is
// gone.
func (m *testMachine) awaitEnd(replica string) func() {
	m.t.Helper()
	events, done := make(chan netlink.LinkUpdate, 1000), make(chan struct{})
	check(m.t, netlink.LinkSubscribe(events, done))
	return func() {
		for e := range events {
			if e.Header.Type == unix.RTM_DELLINK && e.Link.Attrs().Name == linkName(netip.MustParseAddr(replica)) {
				break
			}
		}
		close(done)
		for range events { // until it is closed
		}
	}
}
