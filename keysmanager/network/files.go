package network

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Files writes the files that replicas see as /etc/hosts and /etc/resolv.conf, and returns their
// paths. All users may read them. The file hosts maps OpenFaaS's names of the gateway to the
// gateway's address; the zero gateway stands for n.Gateway(). The file resolv names the machine's
// resolvers. If replicas cannot reach all of these, resolv names a forwarder in this process
// instead.
func (n *Networks) Files(gateway netip.AddrPort) (hosts, resolv string, err error) {
	n.use.RLock()
	defer n.use.RUnlock()
	if n.closed {
		return "", "", errors.New("files of replicas' networks: networks are closed")
	}
	addr := gateway.Addr().Unmap()
	if !gateway.IsValid() {
		addr = n.Gateway()
	}
	if !addr.Is4() {
		return "", "", fmt.Errorf("hosts of replicas: gateway %v, want an IPv4 address", gateway)
	}
	hosts = filepath.Join(n.registry.folder(n.slice), "hosts-"+addr.String())
	if err := n.publish(hosts, hostsFile(addr)); err != nil {
		return "", "", fmt.Errorf("hosts of replicas: %w", err)
	}
	c, err := readResolvConf(n.c.resolvConf)
	if err != nil {
		return "", "", fmt.Errorf("resolv.conf of replicas: %w", err)
	}
	text := c.text
	if n.needsForwarder(c) {
		text = c.with(n.Gateway())
	}
	resolv = filepath.Join(n.registry.folder(n.slice), "resolv.conf")
	if err := n.publish(resolv, text); err != nil {
		return "", "", fmt.Errorf("resolv.conf of replicas: %w", err)
	}
	return hosts, resolv, nil
}

// publish writes a file for replicas unless it already has this text.
func (n *Networks) publish(name string, text []byte) error {
	n.publishing.Lock()
	defer n.publishing.Unlock()
	if b, err := os.ReadFile(name); err == nil && bytes.Equal(b, text) {
		return nil
	}
	return replaceFile(name, text, 0o644)
}

// hostsFile returns the replicas' /etc/hosts.
func hostsFile(gateway netip.Addr) []byte {
	return fmt.Appendf(nil, "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n%v\tgateway.openfaas gateway gateway.openfaas.svc.cluster.local\n", gateway)
}

// resolvConf is a parsed resolv.conf.
type resolvConf struct {
	text    []byte
	servers []netip.Addr // at most three, as in libc
}

// maxServers is how many name servers of a resolv.conf count.
const maxServers = 3

// readResolvConf parses a file like /etc/resolv.conf. If the file is missing or has no name
// servers, the result has 127.0.0.1 as the server.
func readResolvConf(name string) (resolvConf, error) {
	b, err := os.ReadFile(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return resolvConf{}, err
	}
	c := resolvConf{text: b}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "nameserver" && len(c.servers) < maxServers {
			if a, err := netip.ParseAddr(f[1]); err == nil {
				c.servers = append(c.servers, a.Unmap())
			}
		}
	}
	if len(c.servers) == 0 {
		c.servers = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	}
	return c, nil
}

// with returns the text with another name server.
func (c resolvConf) with(server netip.Addr) []byte {
	out := fmt.Appendf(nil, "nameserver %v\n", server)
	for line := range strings.Lines(string(c.text)) {
		if f := strings.Fields(line); len(f) > 1 && (f[0] == "search" || f[0] == "domain" || f[0] == "options") {
			out = append(out, strings.TrimRight(line, "\n")+"\n"...)
		}
	}
	return out
}

// needsForwarder reports whether replicas may not reach all name servers.
func (n *Networks) needsForwarder(c resolvConf) bool {
	return n.c.GatewayOnly || slices.ContainsFunc(c.servers, func(server netip.Addr) bool { return !n.Reaches(server) })
}
