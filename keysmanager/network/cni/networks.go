package cni

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containernetworking/cni/libcni"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/stagecoach-serving/stagecoach/keysmanager/network"
)

// Networks gives replicas networks of an operator's plugins. Its methods are safe for concurrent
// use. Those of network.Networks that it does not replace are about the link to the gateway.
type Networks struct {
	*network.Networks
	plugins *libcni.CNIConfig
	list    *libcni.NetworkConfigList
	file    string // of the configuration
	records records
	lock    *os.File // says that the owner runs
	wait    time.Duration
	log     *slog.Logger

	ctx     context.Context // ends ADDs under way
	cancel  context.CancelFunc
	kick    chan struct{} // has room for one
	running sync.WaitGroup

	use    sync.RWMutex // held by users, and exclusively by Close and Detach
	closed bool

	mu     sync.Mutex
	adding map[string]bool // IDs whose Create is under way
	warned map[string]bool // IDs whose DEL has failed before
}

// Kind is the kind of these networks, as a part of a zygote's key.
const Kind = "cni"

// ifName is the name that plugins give to a replica's link.
const ifName = "eth0"

// Open checks the configuration and its plugins, opens the link to the gateway, and gives back what
// earlier processes have left. The caller ends with [Networks.Close] or [Networks.Detach].
func Open(links network.Config, c Config) (*Networks, error) { return open(links, c, wait) }

func open(links network.Config, c Config, wait time.Duration) (_ *Networks, err error) {
	if err := check(context.Background(), c); err != nil {
		return nil, err
	}
	n := &Networks{wait: wait, log: links.Log, kick: make(chan struct{}, 1), adding: map[string]bool{}, warned: map[string]bool{}}
	if n.list, n.file, err = load(c.Conf); err != nil {
		return nil, err
	}
	// The machine's part is another one than without plugins, because its firewall forwards nothing.
	owner := links.Owner
	links.Owner, links.GatewayOnly = owner+" with CNI", true
	if n.Networks, err = network.Open(links); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Networks.Detach())
		}
	}()
	n.plugins = libcni.NewCNIConfig(c.BinDirs, &executor{wait: wait})
	n.records = records{dir: filepath.Join(links.Run, "networks", "cni"), cached: n.plugins}
	//nolint:gosec // replicas' resolv.conf is read through it
	if err := os.MkdirAll(n.records.dir, 0o711); err != nil {
		return nil, err
	}
	sum := sha256.Sum256([]byte(owner))
	n.records.own = hex.EncodeToString(sum[:6])
	if n.lock, err = n.records.lock(n.records.own, lockPatience); err != nil {
		return nil, err
	}
	n.ctx, n.cancel = context.WithCancel(context.Background())
	n.running.Go(n.tidy)
	return n, nil
}

// lockPatience bounds the wait for the end of an earlier process of the same owner.
const lockPatience = 30 * time.Second

// Kind implements resources.Networks.
func (*Networks) Kind() string { return Kind }

// Create returns a new namespace that the plugins have connected, and the path of its resolv.conf;
// empty: the plugins have given no name servers. The caller starts a process in the namespace, and
// then closes the file. If a process has entered the namespace until then, it stays until its last
// process has ended.
func (n *Networks) Create() (ns *os.File, resolv string, err error) {
	n.use.RLock()
	defer n.use.RUnlock()
	if n.closed {
		return nil, "", errors.New("create a replica's network: networks are closed")
	}
	id := n.records.newID()
	n.set(n.adding, id, true)
	defer n.Ended() // which gives back what a failed Create has left
	defer n.set(n.adding, id, false)
	if ns, err = n.Networks.Create(); err != nil {
		return nil, "", err
	}
	if resolv, err = n.connect(ns, id); err != nil {
		ns.Close()
		return nil, "", fmt.Errorf("network %s of %s: %w", n.list.Name, n.file, err)
	}
	return ns, resolv, nil
}

func (n *Networks) connect(ns *os.File, id string) (resolv string, err error) {
	at, err := n.records.begin(id, ns, n.list.Bytes)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(n.ctx, n.wait)
	defer cancel()
	answer, err := n.plugins.AddNetworkList(ctx, n.list, &libcni.RuntimeConf{ContainerID: id, NetNS: at, IfName: ifName})
	if err != nil {
		return "", err
	}
	result, err := types100.GetResult(answer)
	if err != nil {
		return "", fmt.Errorf("its plugins' answer: %w", err)
	}
	if len(result.IPs) == 0 {
		return "", errors.New("its plugins have answered without an address; want an ipam section that assigns one")
	}
	var servers []netip.Addr
	text := ""
	for _, s := range result.DNS.Nameservers {
		a, err := netip.ParseAddr(s)
		if err != nil {
			return "", fmt.Errorf("its plugins have answered with the name server %q, want an IP address", s)
		}
		servers = append(servers, a.Unmap())
		text += "nameserver " + s + "\n"
	}
	if err := network.Guard(ns, servers); err != nil {
		return "", err
	}
	if text == "" {
		return "", nil
	}
	if len(result.DNS.Search) > 0 {
		text += "search " + strings.Join(result.DNS.Search, " ") + "\n"
	}
	if len(result.DNS.Options) > 0 {
		text += "options " + strings.Join(result.DNS.Options, " ") + "\n"
	}
	resolv = filepath.Join(n.records.dir, id, "resolv.conf")
	return resolv, os.WriteFile(resolv, []byte(text), 0o644) //nolint:gosec // replicas read it
}

func (n *Networks) set(in map[string]bool, id string, to bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if to {
		in[id] = true
	} else {
		delete(in, id)
	}
}

// Ended implements resources.Networks. It does not block.
func (n *Networks) Ended() {
	select {
	case n.kick <- struct{}{}:
	default: // somebody else has asked
	}
}

// Times of the search for namespaces without processes.
const (
	again = time.Second      // after an end: other processes of the namespace may end a little later
	late  = 30 * time.Second // in any case, for DELs that have failed
)

// tidy gives back what earlier processes have left, and then the networks of namespaces whose last
// process has ended.
func (n *Networks) tidy() {
	n.recover()
	timer := time.NewTimer(late)
	defer timer.Stop()
	for {
		next := late
		select {
		case <-n.ctx.Done():
			return
		case <-n.kick:
			next = again
		case <-timer.C:
		}
		n.sweep(n.records.own, false)
		timer.Reset(next)
	}
}

// recover gives back what ended processes have left: this owner's, and those of owners that do not
// run.
func (n *Networks) recover() {
	n.sweep(n.records.own, false)
	for _, owner := range n.records.owners() {
		if owner == n.records.own {
			continue
		}
		if f, err := n.records.lock(owner, 0); err == nil {
			n.sweep(owner, false)
			_ = f.Close() // nothing was written
		}
	}
}

// maxDeletions is how many DELs run at the same time.
const maxDeletions = 8

// sweep gives back an owner's networks without processes; with all set, those with processes too.
func (n *Networks) sweep(owner string, all bool) {
	ids := n.records.ids(owner)
	if len(ids) == 0 {
		return
	}
	n.mu.Lock()
	ids = slices.DeleteFunc(ids, func(id string) bool { return n.adding[id] })
	n.mu.Unlock()
	used, err := namespacesInUse()
	if err != nil {
		n.log.Warn("failed to see which networks of CNI plugins are in use; none is given back", "error", err)
		return
	}
	var running sync.WaitGroup
	room := make(chan struct{}, maxDeletions)
	for _, id := range ids {
		if ns := n.records.namespace(id); !all && ns != "" && used[ns] {
			continue
		}
		room <- struct{}{}
		running.Go(func() { defer func() { <-room }(); n.giveBack(id) })
	}
	running.Wait()
}

// giveBack has the plugins delete what they have made for a namespace. If that fails, a later sweep
// tries again.
func (n *Networks) giveBack(id string) {
	// Not n.ctx: Close gives back too.
	ctx, cancel := context.WithTimeout(context.Background(), n.wait)
	defer cancel()
	err := n.records.end(ctx, id)
	n.mu.Lock()
	before := n.warned[id]
	if err != nil {
		n.warned[id] = true
	} else {
		delete(n.warned, id)
	}
	n.mu.Unlock()
	if err != nil && !before {
		n.log.Warn("plugins have not given back the network of an ended replica; this is tried again", "network", n.list.Name, "id", id, "error", err)
	}
}

// Close gives back all networks, also those of living replicas. A second call does nothing.
func (n *Networks) Close() error { return n.end(true) }

// Detach closes the Networks and leaves those of living replicas to the next Open of the owner.
func (n *Networks) Detach() error { return n.end(false) }

func (n *Networks) end(all bool) error {
	n.cancel() // so that no Create waits for a plugin
	n.use.Lock()
	defer n.use.Unlock()
	if n.closed {
		return nil
	}
	n.closed = true
	n.running.Wait()
	n.sweep(n.records.own, all)
	err := n.Networks.Detach
	if all {
		err = n.Networks.Close
	}
	return errors.Join(err(), n.lock.Close())
}

// newID returns an ID for a namespace of this owner.
func (r records) newID() string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails
	return prefix + r.own + "-" + hex.EncodeToString(b[:])
}

// namespacesInUse returns the network namespaces that have processes, or that this process has open
// files of.
func namespacesInUse() (map[string]bool, error) {
	used := map[string]bool{}
	// Files first, because Create's caller closes its file once a process has entered. Processes
	// twice, because a process may start another one and end during the search.
	const processes = "/proc/[0-9]*/ns/net"
	for _, pattern := range []string{"/proc/self/fd/*", processes, processes} {
		files, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, f := range files {
			if to, err := os.Readlink(f); err == nil { // else its process has ended
				used[to] = true
			}
		}
	}
	return used, nil
}
