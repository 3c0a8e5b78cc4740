package network

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

const forwardKey = "net/ipv4/ip_forward"

// forwardOn enables forwarding on the machine, and records that it was off before. It runs in the
// namespace of Open.
func (n *Networks) forwardOn() error {
	b, err := os.ReadFile("/proc/sys/" + forwardKey)
	if err != nil {
		return unavailable("forwarding", err)
	}
	if strings.TrimSpace(string(b)) != "0" {
		return nil
	}
	if err := replaceFile(n.forwardFile(), []byte("0\n"), 0o600); err != nil {
		return err
	}
	if err := setSysctl(forwardKey, "1"); err != nil {
		return unavailable("forwarding", err)
	}
	n.log.Info("net.ipv4.ip_forward was 0 and is 1 now, for replicas; the last Stagecoach process that ends sets it back")
	return nil
}

// forwardFile exists while forwarding is on because of Stagecoach.
func (n *Networks) forwardFile() string { return filepath.Join(n.registry.dir, "forward") }

// forwardOff disables forwarding if it was off before the first process opened, and if no other
// process or replica needs it.
func (n *Networks) forwardOff(m *machine) error {
	if _, err := os.Stat(n.forwardFile()); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	known, err := n.known()
	if err != nil {
		return err
	}
	for _, s := range known {
		taken, err := n.registry.reserved(s)
		if err != nil {
			return err
		}
		if s != n.slice && (taken || m.living(s)) {
			return nil
		}
	}
	if err := n.in(func() error { return setSysctl(forwardKey, "0") }); err != nil {
		return err
	}
	n.log.Info("net.ipv4.ip_forward is 0 again")
	return os.Remove(n.forwardFile())
}

// warnOfObstacles logs other firewalls that keep replicas from leaving the machine.
func (n *Networks) warnOfObstacles() {
	chains, err := n.firewall.obstacles()
	if err != nil {
		n.log.Warn("failed to read other firewalls, which may keep replicas from leaving the machine", "err", err)
	}
	if len(chains) > 0 {
		n.log.Warn("a firewall drops what the machine forwards: accept there what comes from and goes to links "+prefix+"*, or replicas cannot leave the machine",
			"chains", strings.Join(chains, ", "), "example", "iptables -I FORWARD -i "+prefix+"+ -j ACCEPT; iptables -I FORWARD -o "+prefix+"+ -j ACCEPT")
	}
}
