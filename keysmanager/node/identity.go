package node

import (
	"cmp"
	"crypto/rand"
	"fmt"
	"os"
	"strings"
	"time"
)

// Identify returns the identity of this process as the daemon of a node, with a new id.
func Identify(name, version string) (Identity, error) {
	boot, err := BootID()
	if err != nil {
		return Identity{}, err
	}
	host, err := os.Hostname()
	if err != nil {
		return Identity{}, fmt.Errorf("node: %w", err)
	}
	return Identity{
		Name: name, ID: rand.Text(), Host: host, Boot: boot, PID: os.Getpid(), Version: version, Started: time.Now().UTC().Round(0),
	}, nil
}

// BootID identifies this machine since its last start.
func BootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("node: identify this machine: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// before reports which of two daemons keeps a name: the one that started first, or has the lower
// id.
func (i Identity) before(other Identity) bool {
	return cmp.Or(i.Started.Compare(other.Started), cmp.Compare(i.ID, other.ID)) < 0
}

func (i Identity) String() string {
	return fmt.Sprintf("process %d on host %s (boot %s), started %s", i.PID, i.Host, i.Boot, i.Started.UTC().Format(time.RFC3339))
}
