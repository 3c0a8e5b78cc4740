package network

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func TestReplicasReachTheOutsideByTheMachinesAddress(t *testing.T) {
	m := newMachine(t)
	n := m.open("a")
	ns := m.create(n)
	for _, network := range []string{"tcp", "udp"} {
		m.wantAnswer(ns, network, routerAddr+":7", machineAddr)
	}
	m.wantAnswer(ns, "tcp", farAddr+":7", machineAddr)
	if got, want := m.eth0(ns), "10.231.0.2"; got != want {
		t.Errorf("address %s, want %s", got, want)
	}
	if got := n.Gateway().String(); got != "10.231.0.1" {
		t.Errorf("gateway %s, want 10.231.0.1", got)
	}
	check(t, enter(ns, func() error {
		if eth0, err := net.InterfaceByName("eth0"); err != nil || eth0.MTU != machineMTU {
			t.Errorf("eth0 %v, %v, want MTU %d as on the machine's way out", eth0, err, machineMTU)
		}
		for _, s := range [][2]string{{"net/ipv4/ip_unprivileged_port_start", "0"}, {"net/ipv4/ping_group_range", "0\t2147483647"}} {
			if b, err := os.ReadFile("/proc/sys/" + s[0]); err != nil || strings.TrimSpace(string(b)) != s[1] {
				t.Errorf("%s is %q, %v, want %q", s[0], b, err, s[1])
			}
		}
		return nil
	}))
}

func TestReplicasAreRefusedMachineNeighboursAndMetadata(t *testing.T) {
	m := newMachine(t)
	n, other := m.open("a"), m.open("b")
	ns, neighbour, far := m.create(n), m.create(n), m.create(other)
	for _, at := range []*os.File{neighbour, far, m.home} {
		m.serve(at, ":7")
	}
	// These addresses belong to the machine by a route. No link has them.
	_, local, _ := net.ParseCIDR("203.0.113.0/24")
	check(t, m.netlink.RouteAdd(&netlink.Route{LinkIndex: 1, Dst: local, Scope: netlink.SCOPE_HOST, Type: unix.RTN_LOCAL, Table: unix.RT_TABLE_LOCAL}))
	if n.Gateway() == other.Gateway() {
		t.Fatalf("two owners have the gateway %v, want a slice for each", n.Gateway())
	}
	for name, addr := range map[string]string{
		"neighbour":                      m.eth0(neighbour),
		"replica of another owner":       m.eth0(far),
		"address without a replica":      "10.231.77.7",
		"gateway, a port not admitted":   n.Gateway().String(),
		"gateway of another owner":       other.Gateway().String(),
		"the machine's other address":    machineAddr,
		"metadata service":               metadata,
		"an address of no use (240/4)":   "240.0.0.1",
		"a network's own address (0/8)":  "0.1.2.3",
		"link-local address of nobody":   "169.254.1.1",
		"own slice's broadcast, unicast": "10.231.15.255",
		"Azure's WireServer":             "168.63.129.16",
		"an address that is all local":   "203.0.113.77",
	} {
		if n.Reaches(netip.MustParseAddr(addr)) {
			t.Errorf("Reaches says that replicas reach the %s, %s", name, addr)
		}
		t.Run(name, func(t *testing.T) {
			at := *m
			at.t = t
			for _, network := range []string{"tcp", "udp"} {
				at.wantRefused(ns, network, addr+":7")
			}
		})
	}
	for addr, want := range map[string]bool{
		routerAddr: true, farAddr: true, "::ffff:" + farAddr: true,
		"::ffff:" + machineAddr: false, "::1": false, "2001:db8::1": false, "64:ff9b::a9fe:a9fe": false,
	} {
		if got := n.Reaches(netip.MustParseAddr(addr)); got != want {
			t.Errorf("Reaches(%s) is %t, want %t", addr, got, want)
		}
	}
	// Processes on the machine do not reach replicas either.
	m.wantRefused(m.home, "tcp", m.eth0(neighbour)+":7")
	m.wantAnswer(ns, "tcp", routerAddr+":7", machineAddr)
}

func TestAdmittedPortIsReachedByReplicasOnly(t *testing.T) {
	m := newMachine(t)
	n, other := m.open("a"), m.open("b")
	ns := m.create(n)
	m.serve(m.home, ":7")
	m.serve(m.home, ":8")
	for _, g := range []netip.Addr{n.Gateway(), other.Gateway(), netip.MustParseAddr(machineAddr)} {
		at := netip.AddrPortFrom(g, 7)
		m.wantRefused(ns, "tcp", at.String())
		check(t, n.Admit(at))
		check(t, n.Admit(at)) // again: no error
		m.wantAnswer(ns, "tcp", at.String(), m.eth0(ns))
		m.wantRefused(ns, "udp", at.String())
		m.wantRefused(ns, "tcp", netip.AddrPortFrom(g, 8).String())
	}
	m.wantAnswer(m.home, "tcp", netip.AddrPortFrom(n.Gateway(), 7).String(), n.Gateway().String())
	// The gateway of another owner is admitted only for that owner's replicas.
	m.wantRefused(m.create(other), "tcp", netip.AddrPortFrom(other.Gateway(), 7).String())

	// From outside, the machine's other address can be reached, but not the gateway's.
	check(t, enter(m.outside, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		_, dst, _ := net.ParseCIDR(replicas.String())
		return h.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(machineAddr)})
	}))
	m.wantAnswer(m.outside, "tcp", machineAddr+":7", routerAddr)
	m.wantSilence(m.outside, "tcp", netip.AddrPortFrom(n.Gateway(), 7).String())
	m.serve(ns, ":7")
	m.wantRefused(m.outside, "tcp", m.eth0(ns)+":7")

	for _, bad := range []string{"0.0.0.0:80", "10.231.0.1:0", "[::1]:80", "127.0.0.1:80"} {
		if err := n.Admit(netip.MustParseAddrPort(bad)); err == nil {
			t.Errorf("admits %s, want an error", bad)
		}
	}
}

func TestAdmitRestoresADeletedFirewall(t *testing.T) {
	m := newMachine(t)
	n := m.open("a")
	ns := m.create(n)
	m.serve(m.home, ":7")
	first, second := netip.AddrPortFrom(n.Gateway(), 7), netip.MustParseAddrPort(machineAddr+":8")
	check(t, n.Admit(first))
	n.firewall.conn.FlushRuleset()
	check(t, n.firewall.conn.Flush())
	m.wantAnswer(ns, "tcp", machineAddr+":7", m.eth0(ns)) // nothing refuses any more
	check(t, n.Admit(second))
	m.wantRefused(ns, "tcp", machineAddr+":7")
	m.wantAnswer(ns, "tcp", first.String(), m.eth0(ns)) // admitted before
	m.wantAnswer(ns, "tcp", routerAddr+":7", machineAddr)
	if want := "another process deleted the replicas' firewall"; !strings.Contains(m.log.String(), want) {
		t.Errorf("log %s, want %s", m.log, want)
	}
}

func TestOpenWaitsForOthersForALimitedTime(t *testing.T) {
	r, err := openRegistry(t.TempDir())
	check(t, err)
	defer r.close()
	r.patience = 50 * time.Millisecond
	check(t, r.alone(func() error {
		err := r.alone(func() error { return nil })
		if err == nil || !strings.Contains(err.Error(), "fuser -v") {
			t.Errorf("%v, want the way to find the process that has the lock", err)
		}
		return nil
	}))
	check(t, r.alone(func() error { return nil }))
}

func TestReplicasSendWithTheirOwnAddressOnly(t *testing.T) {
	m := newMachine(t)
	ns := m.create(m.open("a"))
	var outside net.PacketConn
	check(t, enter(m.outside, func() (err error) {
		outside, err = net.ListenPacket("udp4", routerAddr+":9")
		return err
	}))
	defer outside.Close()
	check(t, outside.SetReadDeadline(time.Now().Add(patience)))
	check(t, enter(ns, func() error {
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		eth0, err := h.LinkByName("eth0")
		if err != nil {
			return err
		}
		for _, from := range []string{"10.231.0.9", "10.231.0.1", machineAddr, "203.0.113.9"} {
			if err := h.AddrAdd(eth0, cidr(t, from+"/32")); err != nil {
				return err
			}
			if err := send(from, routerAddr+":9", "spoofed as "+from); err != nil {
				return err
			}
		}
		return send("10.231.0.2", routerAddr+":9", "honest")
	}))
	b := make([]byte, 100)
	size, _, err := outside.ReadFrom(b)
	if got := string(b[:size]); err != nil || got != "honest" {
		t.Errorf("outside gets %q, %v, want nothing before %q", got, err, "honest")
	}
}

// send sends a datagram from an address of the thread's namespace.
func send(from, to, text string) error {
	c, err := (&net.Dialer{LocalAddr: &net.UDPAddr{IP: net.ParseIP(from)}}).Dial("udp4", to)
	if err != nil {
		return err
	}
	defer c.Close()
	_, err = c.Write([]byte(text))
	return err
}

func TestReplicasHaveNoIPv6OutsideLoopback(t *testing.T) {
	m := newMachine(t)
	ns := m.create(m.open("a"))
	m.serve6(m.home, "[::]:7")
	link, err := m.netlink.LinkByName(m.links()[0])
	check(t, err)
	if addrs, err := m.netlink.AddrList(link, netlink.FAMILY_V6); err != nil || len(addrs) > 0 {
		t.Errorf("IPv6 addresses %v, %v of the machine's end, want none", addrs, err)
	}
	const there, here = "fd00:ec2::254", "fd00:ec2::2"
	replica := netip.MustParseAddr(m.eth0(ns))
	add := func(h *netlink.Handle, l netlink.Link, own, peer string, at net.HardwareAddr) error {
		addr := cidr(t, own+"/64")
		addr.Flags = unix.IFA_F_NODAD
		err := h.NeighAdd(&netlink.Neigh{LinkIndex: l.Attrs().Index, Family: unix.AF_INET6, State: netlink.NUD_PERMANENT, IP: net.ParseIP(peer), HardwareAddr: at})
		return errors.Join(err, h.AddrAdd(l, addr))
	}
	check(t, add(m.netlink, link, there, here, mac(inside, replica)))
	check(t, enter(ns, func() error { // as a replica with more rights than it should have
		if err := setSysctl("net/ipv6/conf/eth0/disable_ipv6", "0"); err != nil {
			return err
		}
		h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer h.Close()
		eth0, err := h.LinkByName("eth0")
		if err != nil {
			return err
		}
		return add(h, eth0, here, there, mac(outside, replica))
	}))
	m.wantSilence(ns, "tcp", "["+there+"]:7")
}

func TestLonelyNamespaceHasLoopbackOnly(t *testing.T) {
	m := newMachine(t)
	ns, err := Lonely()
	check(t, err)
	defer ns.Close()
	m.serve(ns, "127.0.0.1:7")
	m.wantAnswer(ns, "tcp", "127.0.0.1:7", "127.0.0.1")
	m.serve6(ns, "[::1]:7")
	m.wantAnswer(ns, "tcp", "[::1]:7", "::1")
	check(t, enter(ns, func() error {
		links, err := net.Interfaces()
		if len(links) != 1 || links[0].Name != "lo" {
			t.Errorf("links %v, want lo", links)
		}
		return err
	}))
	if got, err := m.ask(ns, "tcp", routerAddr+":7"); !errors.Is(err, unix.ENETUNREACH) {
		t.Errorf("the outside answers %q, %v, want %v", got, err, unix.ENETUNREACH)
	}
}

func TestAddressesAreReusedAfterRelease(t *testing.T) {
	m := newMachine(t)
	n := m.open("a", func(c *Config) { c.CIDR = netip.MustParsePrefix("10.9.8.16/28") })
	var all []*os.File
	for range 13 {
		all = append(all, m.create(n))
	}
	_, err := n.Create()
	if err == nil || !strings.Contains(err.Error(), "all 13 addresses of 10.9.8.16/28 have living replicas") {
		t.Fatalf("a 14th replica: %v, want no address", err)
	}
	m.wantAnswer(all[12], "tcp", routerAddr+":7", machineAddr)
	m.wantRefused(all[0], "tcp", m.eth0(all[12])+":7")
	freed := m.eth0(all[5])
	gone := m.awaitEnd(freed)
	all[5].Close()
	gone()
	if got := m.eth0(m.create(n)); got != freed {
		t.Errorf("next address %s, want %s", got, freed)
	}
}

func TestConcurrentCreatesGetAddressesOfTheirOwn(t *testing.T) {
	m := newMachine(t)
	n := m.open("a")
	var mu sync.Mutex
	seen := map[string]int{}
	var running sync.WaitGroup
	for range 8 {
		running.Go(func() {
			for range 8 {
				ns, err := n.Create()
				if err != nil {
					t.Error(err)
					return
				}
				t.Cleanup(func() { ns.Close() })
				addr := m.eth0(ns)
				mu.Lock()
				seen[addr]++
				mu.Unlock()
				// Reading the list does not make the kernel activate the links.
				links, err := dump(m.netlink.LinkList)
				if err != nil {
					t.Error(err)
				}
				for _, l := range links {
					if a := l.Attrs(); a.Name == linkName(netip.MustParseAddr(addr)) && a.OperState != netlink.OperUp {
						t.Errorf("link %s is %v after Create, want up: it drops packets", a.Name, a.OperState)
					}
				}
			}
		})
	}
	running.Wait()
	if len(seen) != 64 || len(m.links()) != 64 {
		t.Errorf("%d addresses and %d links, want 64 of both", len(seen), len(m.links()))
	}
	// No thread is left in a replica's namespace.
	tasks, err := os.ReadDir("/proc/self/task")
	check(t, err)
	for _, task := range tasks {
		ns := "/proc/self/task/" + task.Name() + "/ns/net"
		if _, err := os.Stat(ns); err == nil && !same(ns, "/proc/self/ns/net") && !same(ns, "/proc/thread-self/ns/net") {
			t.Errorf("thread %s is in another namespace", task.Name())
		}
	}
}

func TestForwardingIsSetBackByTheLastToClose(t *testing.T) {
	for _, before := range []string{"0", "1"} {
		t.Run(before, func(t *testing.T) {
			m := newMachine(t)
			check(t, setSysctl(forwardKey, before))
			a, b := m.open("a"), m.open("b")
			check(t, a.Close())
			if got := m.forwarding(); got != "1" {
				t.Errorf("forwarding is %s while one is open, want 1", got)
			}
			check(t, b.Close())
			if got := m.forwarding(); got != before {
				t.Errorf("forwarding is %s after the last, want %s as before", got, before)
			}
			m.wantClean()
			if said := strings.Contains(m.log.String(), "ip_forward"); said != (before == "0") {
				t.Errorf("log says of forwarding: %t, want %t: %s", said, before == "0", m.log)
			}
		})
	}
}

func TestDetachedReplicasServeOn(t *testing.T) {
	m := newMachine(t)
	n := m.open("a")
	m.serve(m.home, ":7")
	at := netip.AddrPortFrom(n.Gateway(), 7)
	check(t, n.Admit(at))
	ns := m.create(n)
	c, err := m.dial(ns, "tcp", routerAddr+":7")
	check(t, err)
	check(t, n.Detach())
	if got, err := say(c, "one"); err != nil || got != machineAddr+" one" {
		t.Errorf("answer %q, %v after the detach", got, err)
	}
	m.wantAnswer(ns, "tcp", routerAddr+":7", machineAddr)
	m.wantAnswer(ns, "tcp", at.String(), m.eth0(ns))

	other := m.open("b")
	if other.Gateway() == n.Gateway() {
		t.Errorf("gateway %v of another owner is that of a living replica", n.Gateway())
	}
	again := m.open("a")
	if again.Gateway() != n.Gateway() {
		t.Errorf("gateway %v, want %v as before", again.Gateway(), n.Gateway())
	}
	m.wantAnswer(ns, "tcp", at.String(), m.eth0(ns))
	check(t, again.Admit(netip.AddrPortFrom(n.Gateway(), 8))) // the new owner has another port
	m.wantRefused(ns, "tcp", at.String())
	if got, err := say(c, "two"); err != nil || got != machineAddr+" two" {
		t.Errorf("answer %q, %v after the adoption", got, err)
	}
	if a, b := m.eth0(ns), m.eth0(m.create(again)); a == b {
		t.Errorf("two replicas have address %s", a)
	}
	c.Close()
	check(t, other.Detach()) // without replicas: as Close
	check(t, again.Close())
	m.wantClean()
}

func TestAddressesOfTheMachineAreLeftOut(t *testing.T) {
	m := newMachine(t)
	up0, err := m.netlink.LinkByName("up0")
	check(t, err)
	check(t, m.netlink.AddrAdd(up0, cidr(t, "10.231.3.1/24")))
	_, dst, _ := net.ParseCIDR("10.231.16.0/22")
	check(t, m.netlink.RouteAdd(&netlink.Route{LinkIndex: up0.Attrs().Index, Dst: dst}))
	n := m.open("a")
	if got := n.Gateway().String(); got != "10.231.32.1" {
		t.Errorf("gateway %s, want 10.231.32.1, after the machine's own addresses and routes", got)
	}
	if !strings.Contains(m.log.String(), "10.231.3.1/24 of up0") {
		t.Errorf("log does not name the address: %s", m.log)
	}
	// A network with the same addresses, and one without free addresses.
	if _, err := m.try("b", func(c *Config) { c.CIDR = netip.MustParsePrefix("10.231.32.0/24") }); err == nil || !strings.Contains(err.Error(), "other processes have") {
		t.Errorf("a network inside another process's slice: %v, want none", err)
	}
	if _, err := m.try("b", func(c *Config) { c.CIDR = netip.MustParsePrefix("10.231.0.0/20") }); err == nil || !strings.Contains(err.Error(), "10.231.3.1/24 of up0") {
		t.Errorf("a network with the machine's address: %v, want an error that names it", err)
	}
}

func TestFirewallsOfOthersAreNamed(t *testing.T) {
	m := newMachine(t)
	conn, err := nftables.New(nftables.WithNetNSFd(int(m.home.Fd())))
	check(t, err)
	policy := nftables.ChainPolicyDrop
	table := conn.AddTable(&nftables.Table{Name: "filter", Family: nftables.TableFamilyIPv4})
	conn.AddChain(&nftables.Chain{Name: "FORWARD", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter, Policy: &policy})
	last := conn.AddTable(&nftables.Table{Name: "strict", Family: nftables.TableFamilyINet})
	chain := conn.AddChain(&nftables.Chain{Name: "through", Table: last, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookForward, Priority: nftables.ChainPriorityFilter})
	f := &firewall{conn: conn, table: last}
	f.rule(chain, from("eth9"), drop)
	check(t, conn.Flush())
	m.open("a")
	if s := m.log.String(); !strings.Contains(s, `chains="filter FORWARD"`) {
		t.Errorf("log %s, want the chain filter FORWARD", s)
	}
	f.rule(chain, drop)
	check(t, conn.Flush())
	m.open("b")
	if s := m.log.String(); !strings.Contains(s, `chains="filter FORWARD, strict through"`) {
		t.Errorf("log %s, want the chains filter FORWARD and strict through", s)
	}
}

func TestFaultsOfAConfigAreNamed(t *testing.T) {
	m := newMachine(t)
	for _, c := range []string{"10.0.0.1/16", "10.0.0.0/7", "10.0.0.0/22", "fd00::/16"} {
		if _, err := m.try("a", func(cfg *Config) { cfg.CIDR = netip.MustParsePrefix(c) }); err == nil || !strings.Contains(err.Error(), c) {
			t.Errorf("network %s: error %v, want one that names it", c, err)
		}
	}
	if _, err := m.try(""); err == nil {
		t.Error("no owner: no error")
	}
	n := m.open("a")
	check(t, n.Close())
	check(t, n.Close())
	if ns, err := n.Create(); err == nil {
		ns.Close()
		t.Error("creates a network after Close")
	}
}

func TestTwoPrefixesNeverShareALinkName(t *testing.T) {
	all := slices.Collect(divide(netip.MustParsePrefix("10.0.0.0/8")))
	if len(all) != 4096 || all[4095].String() != "10.255.240.0/20" {
		t.Fatalf("%d slices up to %v, want 4096 up to 10.255.240.0/20", len(all), all[len(all)-1])
	}
	seen := map[string]netip.Prefix{}
	for _, p := range all {
		if other, twice := seen[linkPrefix(p)]; twice {
			t.Fatalf("links of %v and %v begin with %s", p, other, linkPrefix(p))
		}
		seen[linkPrefix(p)] = p
		for _, a := range []netip.Addr{offset(p.Addr(), 2), offset(p.Addr(), 4094)} {
			name := linkName(a)
			if back, ok := linkAddr(name); !ok || back != a || len(name) > 15 || !strings.HasPrefix(name, linkPrefix(p)) {
				t.Fatalf("link %s of %v in %v", name, a, p)
			}
		}
		if back, ok := folderSlice(folderName(p)); !ok || back != p {
			t.Fatalf("folder %s of %v", folderName(p), p)
		}
	}
	for _, name := range []string{"eth0", "sgc", "sgcxyz", "sgc0a0000", "sgc0a00000102", "0a000001"} {
		if a, ok := linkAddr(name); ok {
			t.Errorf("link %s is of replica %v, want of none", name, a)
		}
	}
}

func BenchmarkCreate(b *testing.B) {
	m := newMachine(b)
	n := m.open("a")
	var all []*os.File
	b.ResetTimer()
	for i := 0; i < b.N; i++ {
		ns, err := n.Create()
		check(b, err)
		all = append(all, ns)
		if len(all) == 100 { // as many replicas as a machine may have
			b.StopTimer()
			closeAll(all)
			all = all[:0]
			b.StartTimer()
		}
	}
	b.StopTimer()
	closeAll(all)
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
