package network

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"
)

// nowhere lists networks that replicas never reach. Clouds serve the machine's credentials at some
// of them.
var nowhere = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("100.100.100.200/32"), // Alibaba Cloud's metadata
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("168.63.129.16/32"), // Azure's WireServer
	netip.MustParsePrefix("169.254.0.0/16"),   // link-local: most clouds' metadata
	netip.MustParsePrefix("192.0.0.192/32"),   // Oracle Cloud's metadata, of old
	netip.MustParsePrefix("224.0.0.0/3"),      // multicast, reserved, broadcast
}

// Reaches reports whether replicas reach an address without admission, which means that it is an
// IPv4 address of another machine. A process that connects on behalf of a replica asks Reaches
// first.
func (n *Networks) Reaches(a netip.Addr) bool {
	a = a.Unmap()
	if !a.Is4() || n.c.CIDR.Contains(a) || slices.ContainsFunc(nowhere, func(p netip.Prefix) bool { return p.Contains(a) }) {
		return false
	}
	routes, err := n.netlink.RouteGet(a.AsSlice())
	if err != nil {
		// No route leads to the address now, but it is not this machine's.
		return errors.Is(err, unix.ENETUNREACH) || errors.Is(err, unix.EHOSTUNREACH)
	}
	return len(routes) == 1 && routes[0].Type == unix.RTN_UNICAST
}

// Admit lets replicas reach a TCP port of this machine at this address, whichever process listens
// there. Later calls add ports. The first call after [Open] removes the ports that an earlier
// process with the same owner admitted. If the firewall was deleted (`nft flush ruleset`), Admit
// creates it again.
func (n *Networks) Admit(gateway netip.AddrPort) error {
	n.use.RLock()
	defer n.use.RUnlock()
	if n.closed {
		return errors.New("admit a port: networks are closed")
	}
	gateway = netip.AddrPortFrom(gateway.Addr().Unmap(), gateway.Port())
	if a := gateway.Addr(); !a.Is4() || a.IsUnspecified() || a.IsLoopback() || gateway.Port() == 0 {
		return fmt.Errorf("admit %v for replicas, want an IPv4 address of this machine that is not on loopback, such as %v, and a port", gateway, n.Gateway())
	}
	n.admitting.Lock()
	defer n.admitting.Unlock()
	all := n.admitted
	if !slices.Contains(all, gateway) {
		all = append(slices.Clip(all), gateway)
	}
	entries := n.ownEntries()
	for _, a := range all {
		entries = append(entries, element(unix.IPPROTO_TCP, a))
	}
	err := n.firewall.admit(len(n.admitted) == 0, entries...)
	if errors.Is(err, unix.ENOENT) {
		n.log.Warn("another process deleted the replicas' firewall, so replicas could reach this machine; the firewall is restored", "table", n.firewall.table.Name)
		if err = n.firewall.install(n.slice, n.c.CIDR, n.Gateway(), n.c.GatewayOnly); err == nil {
			err = n.firewall.admit(false, entries...)
		}
	}
	if err != nil {
		return fmt.Errorf("admit %v for replicas: %w", gateway, err)
	}
	n.admitted = all
	return nil
}
