// Package peer finds out which client sent an HTTP request, so that limits per client also work
// behind proxies.
package peer

import (
	"fmt"
	"net/http"
	"net/netip"
	"strings"
)

// Proxies are the addresses whose X-Forwarded-For is trusted. The zero value trusts nobody.
type Proxies []netip.Prefix

// ParseProxies parses a list of CIDRs such as 10.0.0.0/8 or fd00::/8, and of single addresses. The
// error names the first element that is neither.
func ParseProxies(list []string) (Proxies, error) {
	var out Proxies
	for _, s := range list {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			a, bad := netip.ParseAddr(s)
			if bad != nil || a.Zone() != "" {
				return nil, fmt.Errorf("%q, want an address or a CIDR such as 10.0.0.0/8", s)
			}
			p = netip.PrefixFrom(a, a.BitLen())
		}
		if a := p.Addr(); a.Is4In6() {
			if p.Bits() < 96 {
				return nil, fmt.Errorf("%q, want an IPv4 network as IPv4, such as 10.0.0.0/8", s)
			}
			p = netip.PrefixFrom(a.Unmap(), p.Bits()-96)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// Client returns the address of the client that sent r. If the connection comes from a trusted
// proxy, the result is the rightmost address in X-Forwarded-For that is not a trusted proxy's.
// Otherwise, it is the connection's address. A client can forge only addresses further left. If an
// entry is not an address, the proxy that passed it on counts as the client.
//
// An IPv6 address is cut to its /64 network, because one client has a whole network. The result is
// the zero Addr if the connection has no address.
func (p Proxies) Client(r *http.Request) netip.Addr {
	from, ok := parse(r.RemoteAddr)
	if !ok || !p.trusted(from) {
		return network(from)
	}
	lines := r.Header["X-Forwarded-For"]
	for i := len(lines) - 1; i >= 0; i-- {
		for rest, more := lines[i], true; more; {
			var entry string
			if at := strings.LastIndexByte(rest, ','); at >= 0 {
				rest, entry = rest[:at], rest[at+1:]
			} else {
				entry, more = rest, false
			}
			a, ok := parse(strings.TrimSpace(entry))
			if !ok {
				return network(from)
			}
			if from = a; !p.trusted(a) {
				return network(a)
			}
		}
	}
	return network(from)
}

func (p Proxies) trusted(a netip.Addr) bool {
	for _, prefix := range p {
		if prefix.Contains(a) {
			return true
		}
	}
	return false
}

// parse parses an address with or without a port.
func parse(s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(s, "["), "]"))
	if err != nil {
		ap, err := netip.ParseAddrPort(s)
		if err != nil {
			return netip.Addr{}, false
		}
		a = ap.Addr()
	}
	return a.Unmap().WithZone(""), true
}

// network returns an IPv4 address unchanged, and the /64 network of an IPv6 address.
func network(a netip.Addr) netip.Addr {
	if !a.Is6() {
		return a
	}
	n, _ := a.Prefix(64) // fails only above 128 bits
	return n.Addr()
}
