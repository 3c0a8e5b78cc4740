package network

import (
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// prefix begins the names of the links of all replicas of all Stagecoach processes on the machine.
const prefix = "sgc"

// linkName returns the name of the link to the replica with this address. Names have at most 15
// bytes.
func linkName(a netip.Addr) string {
	b := a.As4()
	return prefix + hex.EncodeToString(b[:])
}

// linkAddr returns the address of the replica behind a link. ok is false for other links.
func linkAddr(name string) (_ netip.Addr, ok bool) {
	b, err := hex.DecodeString(strings.TrimPrefix(name, prefix))
	if err != nil || len(b) != 4 || !strings.HasPrefix(name, prefix) {
		return netip.Addr{}, false
	}
	return netip.AddrFrom4([4]byte(b)), true
}

// linkPrefix returns the common start of the names of a slice's links. No link of another slice has
// it, because slices end at a hexadecimal digit of the address.
func linkPrefix(slice netip.Prefix) string {
	return linkName(slice.Addr())[:len(prefix)+slice.Bits()/4]
}

// mac returns the hardware address of an end of a pair.
func mac(kind byte, a netip.Addr) net.HardwareAddr {
	b := a.As4()
	return net.HardwareAddr{kind, 0x53, b[0], b[1], b[2], b[3]}
}

// First bytes of hardware addresses, which are locally administered and unicast.
const (
	inside  = 0x02
	outside = 0x06
)

// genModeNone is the kernel's IN6_ADDR_GEN_MODE_NONE: a link gets no IPv6 address when it comes up.
const genModeNone = 1

// GatewayLink is the name that a replica's link has inside, with [Config.GatewayOnly].
const GatewayLink = "gateway0"

// link returns the name that a replica's link has inside.
func (c *Config) link() string {
	if c.GatewayOnly {
		return GatewayLink
	}
	return "eth0"
}

// host returns a network of one address.
func host(a netip.Addr) *net.IPNet {
	return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(32, 32)}
}

// Create returns a new network namespace with a loopback link and a link eth0 that leads out of the
// machine. With [Config.GatewayOnly], the link is [GatewayLink] and leads to this machine alone.
// The caller starts a process in it and closes the file. When the last process in the namespace
// ends, the kernel removes the namespace and its links, and its address is free again. Create is
// safe for concurrent use. It returns an error if all addresses of the slice are in use.
func (n *Networks) Create() (*os.File, error) {
	n.use.RLock()
	defer n.use.RUnlock()
	if n.closed {
		return nil, errors.New("create a replica's network: networks are closed")
	}
	var ns *os.File
	err := onThread(func() error {
		file, h, err := newNamespace()
		if err != nil {
			return err
		}
		defer h.Close()
		if err := n.connect(file, h); err != nil {
			file.Close()
			return err
		}
		ns = file
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("create a replica's network: %w", err)
	}
	return ns, nil
}

// connect links a new namespace with the machine.
func (n *Networks) connect(ns *os.File, h *netlink.Handle) error {
	veth, addr, err := n.allocate(ns)
	if err != nil {
		return err
	}
	err = n.connectOutside(veth, addr)
	if err == nil {
		err = n.connectInside(h, addr)
	}
	if err == nil {
		err = n.awaitOutside(veth)
	}
	if err != nil {
		_ = n.netlink.LinkDel(veth) // if this fails, the link ends with the namespace
		return fmt.Errorf("link %s: %w", veth.Name, err)
	}
	return nil
}

// allocate creates the pair of links of a free address. The kernel refuses a name that exists.
func (n *Networks) allocate(ns *os.File) (*netlink.Veth, netip.Addr, error) {
	for range n.size() {
		addr := n.address(n.next.Add(1) - 1)
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.Group, attrs.HardwareAddr, attrs.MTU = linkName(addr), number(n.slice.Addr()), mac(outside, addr), n.mtu
		veth := netlink.NewVeth(attrs)
		veth.PeerName, veth.PeerHardwareAddr, veth.PeerMTU = n.c.link(), mac(inside, addr), uint32(n.mtu)
		veth.PeerNamespace = netlink.NsFd(int(ns.Fd()))
		err := n.netlink.LinkAdd(veth)
		if errors.Is(err, unix.EEXIST) {
			continue
		}
		if err != nil {
			return nil, addr, fmt.Errorf("create link %s: %w", attrs.Name, err)
		}
		return veth, addr, nil
	}
	return nil, netip.Addr{}, fmt.Errorf("all %d addresses of %v have living replicas, want fewer replicas on this machine", n.size(), n.slice)
}

// size returns for how many replicas the slice has addresses: all but the network's, the gateway's
// and the last.
func (n *Networks) size() uint32 { return 1<<(32-n.slice.Bits()) - 3 }

// address returns the address for replica i. It starts over after the last address, so the most
// recently freed address is reused last.
func (n *Networks) address(i uint32) netip.Addr {
	return offset(n.slice.Addr(), 2+i%n.size())
}

// connectOutside sets up the machine's end of a replica's link. Its neighbour entry (ARP) is
// permanent, so no replica can claim another's address, nothing waits for ARP, and many replicas do
// not fill the machine's neighbour table.
func (n *Networks) connectOutside(veth *netlink.Veth, addr netip.Addr) error {
	// EAFNOSUPPORT: the kernel has no IPv6.
	if err := n.netlink.LinkSetIP6AddrGenMode(veth, genModeNone); err != nil && !errors.Is(err, unix.EAFNOSUPPORT) {
		return fmt.Errorf("no IPv6: %w", err)
	}
	if err := n.netlink.LinkSetUp(veth); err != nil {
		return fmt.Errorf("up: %w", err)
	}
	if err := n.netlink.RouteAdd(&netlink.Route{LinkIndex: veth.Index, Dst: host(addr), Src: n.Gateway().AsSlice(), Scope: netlink.SCOPE_LINK}); err != nil {
		return fmt.Errorf("route to %v: %w", addr, err)
	}
	return neighbour(n.netlink, veth.Index, addr, mac(inside, addr))
}

// connectInside sets up the link in the namespace of handle h. Its routes lead everywhere, or with
// Config.GatewayOnly to the machine's addresses that replicas may reach.
func (n *Networks) connectInside(h *netlink.Handle, addr netip.Addr) error {
	name := n.c.link()
	link, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if err := h.AddrAdd(link, &netlink.Addr{IPNet: host(addr)}); err != nil {
		return fmt.Errorf("%s: address %v: %w", name, addr, err)
	}
	if err := h.LinkSetUp(link); err != nil {
		return fmt.Errorf("%s: up: %w", name, err)
	}
	index := link.Attrs().Index
	if err := neighbour(h, index, n.Gateway(), mac(outside, addr)); err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	_, everywhere, _ := net.ParseCIDR("0.0.0.0/0")
	targets := []*net.IPNet{everywhere}
	if n.c.GatewayOnly {
		// The gateway's route carries no Gw: the neighbour is the machine.
		if err := h.RouteAdd(&netlink.Route{LinkIndex: index, Dst: host(n.Gateway()), Scope: netlink.SCOPE_LINK}); err != nil {
			return fmt.Errorf("%s: route to %v: %w", name, n.Gateway(), err)
		}
		targets = nil
		n.admitting.Lock()
		for _, a := range n.admitted {
			if t := host(a.Addr()); a.Addr() != n.Gateway() && !slices.ContainsFunc(targets, func(o *net.IPNet) bool { return o.IP.Equal(t.IP) }) {
				targets = append(targets, t)
			}
		}
		n.admitting.Unlock()
	}
	for _, to := range targets {
		route := &netlink.Route{LinkIndex: index, Dst: to, Gw: n.Gateway().AsSlice(), Flags: int(netlink.FLAG_ONLINK)}
		if err := h.RouteAdd(route); err != nil {
			return fmt.Errorf("%s: route to %v: %w", name, to, err)
		}
	}
	return nil
}

// deleteLinks deletes all links of the slice in one request, because each separate request would
// take about 25 ms. It runs in the namespace of Open.
func (n *Networks) deleteLinks() error {
	req := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(number(n.slice.Addr()))))
	// ENODEV: the slice has no links.
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("delete the links of %v: %w", n.slice, err)
	}
	return nil
}

// awaitOutside waits until the machine's end of a link can send. This end came up before its peer,
// so the kernel activates it later, in the background, and drops packets until then. Since Linux
// 6.8, a query for the link's state activates it at once.
func (n *Networks) awaitOutside(veth *netlink.Veth) error {
	for deadline := time.Now().Add(time.Second); ; time.Sleep(time.Millisecond) {
		l, err := n.netlink.LinkByIndex(veth.Index)
		if err != nil {
			return fmt.Errorf("state: %w", err)
		}
		if l.Attrs().OperState == netlink.OperUp {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("state is %v after 1 s, want up", l.Attrs().OperState)
		}
	}
}

// neighbour adds a permanent neighbour entry for addr to a link.
func neighbour(h *netlink.Handle, index int, addr netip.Addr, at net.HardwareAddr) error {
	err := h.NeighAdd(&netlink.Neigh{LinkIndex: index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT, IP: addr.AsSlice(), HardwareAddr: at})
	if err != nil {
		return fmt.Errorf("neighbour %v: %w", addr, err)
	}
	return nil
}

// offset returns the address i after a.
func offset(a netip.Addr, i uint32) netip.Addr {
	return fromNumber(number(a) + i)
}

func number(a netip.Addr) uint32 {
	b := a.As4()
	return uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
}

func fromNumber(n uint32) netip.Addr {
	return netip.AddrFrom4([4]byte{byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)})
}
