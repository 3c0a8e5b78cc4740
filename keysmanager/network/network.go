package network

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Config configures [Networks].
type Config struct {
	// CIDR has the addresses of replicas on this machine: an IPv4 network of /8 to /20, or of /24
	// or /28 for at most 253 or 13 replicas. Several processes on a machine may share it.
	CIDR netip.Prefix
	// Run is a folder that is emptied when the machine starts. All Stagecoach processes on the
	// machine share it.
	Run string
	// Owner names the process. It is unique among running processes, and the same after a restart.
	Owner string
	Log   *slog.Logger
	// GatewayOnly makes networks whose link, named GatewayLink, leads to this machine's admitted
	// addresses and nowhere else. The caller adds other links, which may be named eth0.
	GatewayOnly bool

	resolvConf string // the machine's /etc/resolv.conf, in tests another file
}

// ErrUnavailable means that this process cannot give replicas their own networks. Errors that wrap
// it give the reason.
var ErrUnavailable = errors.New("replicas cannot have their own networks")

// wanted lists the required capabilities.
var wanted = []struct {
	number int
	name   string
}{
	{unix.CAP_NET_ADMIN, "NET_ADMIN"},
	{unix.CAP_NET_BIND_SERVICE, "NET_BIND_SERVICE"},
	{unix.CAP_SYS_ADMIN, "SYS_ADMIN"},
}

// Networks gives replicas their own networks. Its methods are safe for concurrent use.
type Networks struct {
	c        Config
	log      *slog.Logger
	registry *registry
	slice    netip.Prefix
	home     *os.File        // the namespace of Open
	foreign  *os.File        // home, if it is not the process's own namespace; else nil
	netlink  *netlink.Handle // of that namespace
	firewall *firewall
	resolver *forwarder // nil: it could not listen
	mtu      int

	foreignResolver bool // another process listens on port 53
	publishing      sync.Mutex
	next            atomic.Uint32 // counts addresses that were tried

	use    sync.RWMutex // held by users, and exclusively by Close and Detach
	closed bool

	admitting sync.Mutex
	// Addresses that were admitted since Open. While it is empty, the firewall has those of an
	// earlier owner.
	admitted []netip.AddrPort
}

// Open reserves a slice of addresses for replicas on this machine and sets up their way out. If an
// earlier process with the same owner has left a slice, Open adopts it with the replicas that still
// run. Open removes the slices of dead owners in which no replica runs. The caller ends with
// [Networks.Close] or [Networks.Detach]. The error wraps [ErrUnavailable] if this process or kernel
// cannot give replicas networks at all.
func Open(c Config) (*Networks, error) {
	if err := c.check(); err != nil {
		return nil, err
	}
	if err := possible(); err != nil {
		return nil, err
	}
	runtime.LockOSThread() // whose namespace everything is opened in
	defer runtime.UnlockOSThread()
	n := &Networks{c: c, log: c.Log}
	if err := n.open(); err != nil {
		n.release()
		return nil, fmt.Errorf("networks of replicas: %w", err)
	}
	return n, nil
}

func (c *Config) check() error {
	if c.resolvConf == "" {
		c.resolvConf = "/etc/resolv.conf"
	}
	p := c.CIDR
	if !p.Addr().Is4() || p != p.Masked() || p.Bits() < 8 || p.Bits() > sliceBits && !validSlice(p.Bits()) {
		return fmt.Errorf("network of replicas %v, want an IPv4 network of /8 to /20, or /24 or /28, without host bits", p)
	}
	if c.Owner == "" || c.Run == "" || c.Log == nil {
		return errors.New("networks of replicas: owner, folder or log is missing")
	}
	return nil
}

// possible returns why this process cannot create networks, or nil.
func possible() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("%w: this process is not root", ErrUnavailable)
	}
	var data [2]unix.CapUserData
	if err := unix.Capget(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &data[0]); err != nil {
		return fmt.Errorf("%w: capabilities: %w", ErrUnavailable, err)
	}
	var missing []string
	for _, c := range wanted {
		if data[c.number/32].Effective&(1<<(c.number%32)) == 0 {
			missing = append(missing, c.name)
		}
	}
	if len(missing) > 0 {
		return fmt.Errorf("%w: this process lacks the capabilities %s", ErrUnavailable, strings.Join(missing, ", "))
	}
	return onThread(func() error { // in a namespace that ends with this function
		ns, h, err := newNamespace()
		if err != nil {
			return err
		}
		defer ns.Close()
		defer h.Close()
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "probe0"
		veth := netlink.NewVeth(attrs)
		veth.PeerName = "probe1"
		if err := h.LinkAdd(veth); err != nil {
			return unavailable("create a pair of links (veth)", err)
		}
		return nil
	})
}

// unavailable wraps an error. The result wraps [ErrUnavailable] if the error means that this
// process or kernel cannot give replicas networks at all.
func unavailable(what string, err error) error {
	for _, e := range []error{unix.EPERM, unix.EACCES, unix.EROFS, unix.ENOENT, unix.ENOSYS, unix.EOPNOTSUPP, unix.EPROTONOSUPPORT, unix.EAFNOSUPPORT} {
		if errors.Is(err, e) {
			return fmt.Errorf("%w: %s: %w", ErrUnavailable, what, err)
		}
	}
	return fmt.Errorf("%s: %w", what, err)
}

func (n *Networks) open() (err error) {
	if n.home, err = current(); err != nil {
		return err
	}
	if !same("/proc/self/ns/net", "/proc/thread-self/ns/net") {
		n.foreign = n.home
	}
	if n.netlink, err = netlink.NewHandle(unix.NETLINK_ROUTE); err != nil {
		return fmt.Errorf("netlink: %w", err)
	}
	if n.registry, err = openRegistry(n.c.Run); err != nil {
		return err
	}
	return n.registry.alone(func() error {
		m, err := look(n.netlink)
		if err != nil {
			return err
		}
		if n.slice, err = n.choose(m); err != nil {
			return err
		}
		n.mtu = min(1500, m.mtu)
		if m.mtu == 0 {
			n.mtu = 1500
		}
		for _, a := range m.replicas { // start after the addresses in use
			if n.slice.Contains(a) {
				n.next.Store(max(n.next.Load(), number(a)-number(n.slice.Addr())-1))
			}
		}
		if err := n.setUp(); err != nil {
			if !m.living(n.slice) {
				err = errors.Join(err, n.clear(n.slice), n.forwardOff(m))
			}
			return err
		}
		return nil
	})
}

// choose returns the slice that the owner had, or a free one. It removes the rest of other slices.
func (n *Networks) choose(m *machine) (netip.Prefix, error) {
	known, err := n.known()
	if err != nil {
		return netip.Prefix{}, err
	}
	var chosen netip.Prefix
	for _, s := range known {
		taken, err := n.registry.reserved(s)
		if err != nil {
			return netip.Prefix{}, err
		}
		owner, err := n.registry.owner(s)
		if err != nil {
			return netip.Prefix{}, err
		}
		switch {
		case taken:
		case owner == n.c.Owner && !chosen.IsValid() && n.c.CIDR.Overlaps(s) && s.Bits() == max(sliceBits, n.c.CIDR.Bits()):
			chosen = s
		case m.living(s):
			n.log.Warn("replicas of an ended process still have networks", "addresses", s, "owner", owner)
		default:
			if err := n.clear(s); err != nil {
				n.log.Warn("failed to remove the network of an ended process", "addresses", s, "owner", owner, "err", err)
			}
		}
	}
	if chosen.IsValid() {
		return chosen, n.registry.reserve(chosen)
	}
	overlap, busy := "", 0
	for s := range divide(n.c.CIDR) {
		taken, err := n.registry.reserved(s)
		if err != nil {
			return netip.Prefix{}, err
		}
		if taken || m.living(s) {
			busy++
			continue
		}
		if what := m.overlap(s); what != "" {
			if overlap == "" {
				n.log.Info("addresses are left out for replicas: the machine uses some of them", "addresses", s, "used", what)
			}
			overlap = what
			continue
		}
		return s, n.registry.reserve(s)
	}
	if overlap != "" {
		return netip.Prefix{}, fmt.Errorf("no addresses of %v are free: the machine has %s, and other processes have %d slices; want another network", n.c.CIDR, overlap, busy)
	}
	return netip.Prefix{}, fmt.Errorf("no addresses of %v are free: other processes have all %d slices; want a larger network", n.c.CIDR, busy)
}

// known lists the slices that have a folder or a table.
func (n *Networks) known() ([]netip.Prefix, error) {
	folders, err := n.registry.folders()
	if err != nil {
		return nil, err
	}
	// This firewall belongs to no slice: it only lists tables.
	f, err := openFirewall(n.home, netip.PrefixFrom(netip.IPv4Unspecified(), sliceBits))
	if err != nil {
		return nil, unavailable("nftables", err)
	}
	withTable, err := tables(f.conn)
	if err != nil {
		return nil, unavailable("nftables", err)
	}
	all := append(folders, withTable...)
	slices.SortFunc(all, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr())*64 + a.Bits() - b.Bits() })
	return slices.Compact(all), nil
}

// setUp creates or adopts the parts of the slice. The folder is created first and removed last,
// because the other parts are found by it.
func (n *Networks) setUp() (err error) {
	if err := n.registry.setOwner(n.slice, n.c.Owner); err != nil {
		return err
	}
	if err := n.netlink.AddrReplace(loopback, gatewayAddr(n.slice)); err != nil {
		return fmt.Errorf("address %v: %w", n.Gateway(), err)
	}
	if n.firewall, err = openFirewall(n.home, n.slice); err != nil {
		return unavailable("nftables", err)
	}
	if err := n.firewall.install(n.slice, n.c.CIDR, n.Gateway(), n.c.GatewayOnly); err != nil {
		return unavailable("nftables", err)
	}
	if !n.c.GatewayOnly {
		if err := n.in(n.forwardOn); err != nil {
			return err
		}
		n.warnOfObstacles()
	}
	return n.startResolver()
}

var loopback = &netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1, Name: "lo"}}

// gatewayOf returns the machine's address as replicas of a slice see it.
func gatewayOf(slice netip.Prefix) netip.Addr { return offset(slice.Addr(), 1) }

// gatewayAddr returns the gateway's address for the loopback link. Its scope keeps it from being
// the source address of packets that leave the machine.
func gatewayAddr(slice netip.Prefix) *netlink.Addr {
	return &netlink.Addr{IPNet: host(gatewayOf(slice)), Label: label, Scope: int(netlink.SCOPE_HOST)}
}

// Gateway returns the address by which replicas reach this machine: the first of their slice. A
// service can listen on it.
func (n *Networks) Gateway() netip.Addr { return gatewayOf(n.slice) }

// Close removes the owner's part of the machine's network, including the links of living replicas.
// A second call does nothing.
func (n *Networks) Close() error { return n.end(false) }

// Detach closes the Networks. If replicas still run, it leaves their networks in place, and the
// next Open with the same owner adopts these. Until then, the replicas can resolve names only if
// they reach the machine's resolvers without the forwarder in this process.
func (n *Networks) Detach() error { return n.end(true) }

func (n *Networks) end(keep bool) error {
	n.use.Lock()
	defer n.use.Unlock()
	if n.closed {
		return nil
	}
	n.closed = true
	err := n.registry.alone(func() error {
		m, err := look(n.netlink)
		if err != nil {
			return err
		}
		if keep && m.living(n.slice) {
			return nil
		}
		if err := n.in(n.deleteLinks); err != nil {
			return err
		}
		return errors.Join(n.clear(n.slice), n.forwardOff(m))
	})
	n.release()
	if err != nil {
		return fmt.Errorf("networks of replicas: close: %w", err)
	}
	return nil
}

// clear removes a slice that has no links.
func (n *Networks) clear(slice netip.Prefix) error {
	f, err := openFirewall(n.home, slice)
	if err != nil {
		return err
	}
	if err := f.remove(); err != nil {
		return fmt.Errorf("table %s: %w", f.table.Name, err)
	}
	if err := n.netlink.AddrDel(loopback, gatewayAddr(slice)); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
		return fmt.Errorf("address %v: %w", gatewayOf(slice), err)
	}
	return os.RemoveAll(n.registry.folder(slice))
}

// release closes all files. The reservation ends with them.
func (n *Networks) release() {
	if n.resolver != nil {
		n.resolver.close()
	}
	if n.netlink != nil {
		n.netlink.Close()
	}
	if n.home != nil {
		_ = n.home.Close() // nothing was written
	}
	if n.registry != nil {
		n.registry.close()
	}
}
