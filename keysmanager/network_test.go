package keysmanager

import (
	"errors"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/network"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
)

// bareNetworks makes real namespaces with nothing in them, and records its calls.
type bareNetworks struct {
	mu    sync.Mutex
	calls []string
	full  bool // Create fails
}

func (n *bareNetworks) note(call string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.calls = append(n.calls, call)
}

// taken returns the calls since the last call of taken.
func (n *bareNetworks) taken() []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	out := n.calls
	n.calls = nil
	return out
}

func (n *bareNetworks) Create() (*os.File, string, error) {
	n.note("create")
	if n.full {
		return nil, "", errors.New("all addresses are taken")
	}
	ns, err := network.Lonely()
	return ns, "", err
}

func (*bareNetworks) Kind() string { return resources.NetworkDefault }

func (*bareNetworks) Ended() {}

func (n *bareNetworks) Lonely() (*os.File, error) {
	n.note("lonely")
	return network.Lonely()
}

func (n *bareNetworks) Admit(gateway netip.AddrPort) error {
	n.note("admit " + gateway.String())
	return nil
}

func (n *bareNetworks) Files(gateway netip.AddrPort) (hosts, resolv string, err error) {
	n.note("files " + gateway.String())
	return "/etc/hosts", "/etc/resolv.conf", nil
}

// networkOf returns an identifier of a process's network namespace.
func networkOf(t *testing.T, pid int) string {
	t.Helper()
	name, err := os.Readlink("/proc/" + strconv.Itoa(pid) + "/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	return name
}

// TestProcessesGetTheNetworkOfTheirFunction checks that each process is in the network that its
// function asks for, and a fork in that of its zygote.
func TestProcessesGetTheNetworkOfTheirFunction(t *testing.T) {
	openDir(t) // needs root
	nets := &bareNetworks{}
	n := newNode(t, func(c *Config) { c.Networks = nets })
	ours := networkOf(t, os.Getpid())
	seen := map[string]string{ours: "this process"}
	fresh := func(what string, pid int) string {
		t.Helper()
		name := networkOf(t, pid)
		if other, taken := seen[name]; taken {
			t.Errorf("%s is in the network of %s, want one of its own", what, other)
		}
		seen[name] = what
		return name
	}
	plain := node.Spec{Function: "p.ns", Namespace: "ns", Image: "test/wait:1", Gateway: "10.9.0.1:8080"}
	for _, name := range []string{"p1", "p2"} {
		r := n.start(name, plain)
		n.answers(r)
		fresh(name, r.PID)
		if got, want := nets.taken(), []string{"admit 10.9.0.1:8080", "files 10.9.0.1:8080", "create"}; !slices.Equal(got, want) {
			t.Errorf("asked for %q, want %q", got, want)
		}
	}
	lonely := plain
	lonely.Network = "none"
	r := n.start("l", lonely)
	n.answers(r)
	fresh("l", r.PID)
	if got := nets.taken(); !slices.Equal(got, []string{"lonely"}) {
		t.Errorf("asked for %q, want a network with loopback alone", got)
	}
	forked := withModel
	forked.Network = "default"
	a := n.start("a", forked)
	n.answers(a)
	shared := fresh("a", a.PID)
	nets.taken()
	forked.Network = "" // an empty network means the default
	b := n.start("b", forked)
	n.answers(b)
	if got := networkOf(t, b.PID); got != shared || len(nets.taken()) != 0 {
		t.Errorf("a fork is in %s and its sibling in %s, want the same and nothing made for it", got, shared)
	}
	forked.Network = "none"
	c := n.start("c", forked)
	n.answers(c)
	fresh("a fork that asks for another network", c.PID)
	if got := networkOf(t, os.Getpid()); got != ours {
		t.Errorf("this process is in %s now, was in %s", got, ours)
	}
}

// TestOnlyAllowedNetworksAreGiven checks that a function gets the machine's network only where that
// is allowed, and that no replica starts if its network cannot be created.
func TestOnlyAllowedNetworksAreGiven(t *testing.T) {
	openDir(t) // needs root
	nets := &bareNetworks{full: true}
	allowed := newNode(t, func(c *Config) { c.Networks, c.HostNetwork = nets, true })
	asks := node.Spec{Function: "p.ns", Namespace: "ns", Image: "test/wait:1", Network: "host"}
	r := allowed.start("p", asks)
	allowed.answers(r)
	if got, ours := networkOf(t, r.PID), networkOf(t, os.Getpid()); got != ours || len(nets.taken()) != 0 {
		t.Errorf("it is in %s, want the machine's network, %s", got, ours)
	}
	for name, tc := range map[string]struct {
		spec node.Spec
		want string
	}{
		"host": {asks, "--allow-host-network"},
		"full": {node.Spec{Function: "q.ns", Namespace: "ns", Image: "test/wait:1"}, "a network for the function: all addresses are taken"},
		"bad":  {node.Spec{Function: "q.ns", Namespace: "ns", Image: "test/wait:1", Gateway: "here"}, `gateway "here"`},
	} {
		n := newNode(t, func(c *Config) { c.Networks = nets })
		if _, err := n.Start(t.Context(), node.Order{Replica: "r", Spec: tc.spec}); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %s", name, err, tc.want)
		}
	}
}

// TestAdoptedZygotesKeepTheirNetwork checks that a daemon forks no replica from an adopted zygote
// if the zygote is in another network than the function asks for now.
func TestAdoptedZygotesKeepTheirNetwork(t *testing.T) {
	openDir(t) // needs root
	w := wardenOf(t)
	old := after(t, w)
	before := old.start("a", withModel)
	asks := withModel
	asks.Function, asks.Network = "h.ns", resources.NetworkHost
	old.Detach()
	nets := &bareNetworks{}
	n := newNode(t, func(c *Config) { c.Warden, c.Networks = w, nets })
	n.answers(before)
	ours := networkOf(t, os.Getpid())
	if got := networkOf(t, before.PID); got != ours {
		t.Fatalf("without networks a replica is in %s, want the machine's, %s", got, ours)
	}
	b := n.start("b", withModel)
	n.answers(b)
	if got := networkOf(t, b.PID); got == ours {
		t.Error("it is in the machine's network, as its function's zygote was before, want one of its own")
	}
	if _, err := n.Start(t.Context(), node.Order{Replica: "c", Spec: asks}); !errors.Is(err, resources.ErrHostNetwork) {
		t.Errorf("a fork from a zygote in the machine's network: %v, want %v", err, resources.ErrHostNetwork)
	}
}
