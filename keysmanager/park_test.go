package keysmanager

import (
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// rack is a set of devices that a test changes.
type rack struct {
	mu  sync.Mutex
	all []Device
}

func (r *rack) look() []Device {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.all)
}

func (r *rack) change(id string, f func(*Device)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f(&r.all[slices.IndexFunc(r.all, func(d Device) bool { return d.ID == id })])
}

// parking returns a node with devices of these ids, 10 GiB each, and a function whose replicas take
// 4 GiB each.
func parking(t *testing.T, change func(*Config), ids ...string) (*rig, *rack, node.Spec) {
	t.Helper()
	r := &rack{}
	for _, id := range ids {
		r.all = append(r.all, Device{ID: id, Memory: 10 * gib})
	}
	root := t.TempDir()
	n := newNode(t, func(c *Config) {
		c.Images, c.ORT, c.Devices, c.sampleEvery = anyImage{root}, "", r.look, 20*time.Millisecond
		if change != nil {
			change(c)
		}
	})
	return n, r, node.Spec{
		Function: "f.ns", Namespace: "ns", Image: "i", Process: os.Args[0] + " " + actAs + " parks", Env: map[string]string{wire.EnvRuntime: "python"},
		Devices: 1, DeviceMemory: 4 * gib,
	}
}

// keyStages makes exactly these functions key stages.
func (n *rig) keyStages(specs ...node.Spec) {
	n.t.Helper()
	var wanted []node.Wanted
	for _, s := range specs {
		wanted = append(wanted, node.Wanted{Spec: s, Key: true})
	}
	if err := n.Warm(n.t.Context(), wanted); err != nil {
		n.t.Fatal(err)
	}
}

// parkedOn waits until children are parked on exactly these devices, and returns their processes.
func (n *rig) parkedOn(devices ...string) (pids map[string]int) {
	n.t.Helper()
	proctest.Until(n.t, fmt.Sprintf("children to be parked on %q", devices), func() bool {
		pids = map[string]int{}
		n.store.mu.Lock()
		defer n.store.mu.Unlock()
		for _, z := range n.store.slots.parkedZygotes() {
			for device, child := range z.Family.Parked() {
				if !child.Coming {
					pids[device] = child.PID
				}
			}
		}
		return len(pids) == len(devices) && !slices.ContainsFunc(devices, func(id string) bool { return pids[id] == 0 })
	})
	return pids
}

func (n *rig) on(replica, device string, s node.Spec) *startedReplica {
	n.t.Helper()
	r, err := n.Start(n.t.Context(), node.Order{Replica: replica, Spec: s, Device: device})
	if err != nil {
		n.t.Fatal(err)
	}
	n.t.Cleanup(func() { _ = r.Conn.Close() })
	return r
}

// TestParkedChildrenBecomeReplicas checks that children are parked on each device that has room for
// a replica, become replicas, and give way.
func TestParkedChildrenBecomeReplicas(t *testing.T) {
	n, r, s := parking(t, nil, "GPU-a", "GPU-b")
	n.keyStages(s)
	pids := n.parkedOn("GPU-a", "GPU-b")
	for _, d := range n.Inventory().Devices {
		if d.Parked != resources.ContextOverhead || !slices.Equal(d.ParkedFor, []string{"f.ns"}) || d.Reserved != 0 || d.Free != 10*gib {
			t.Errorf("device %+v, want a parked child's %d of all that is free", d, resources.ContextOverhead)
		}
	}
	first := n.on("first", "GPU-a", s)
	if first.Path != PathParked || first.PID != pids["GPU-a"] || n.printed("first") != "[CUDA_VISIBLE_DEVICES=GPU-a]" {
		t.Errorf("path %s, process %d, want the parked child %d", first.Path, first.PID, pids["GPU-a"])
	}
	next := n.parkedOn("GPU-a", "GPU-b")
	if second := n.on("second", "GPU-a", s); second.PID != next["GPU-a"] || second.Path != PathParked {
		t.Errorf("path %s, process %d, want the parked child %d", second.Path, second.PID, next["GPU-a"])
	}
	n.parkedOn("GPU-b") // 2 GiB are left on the other device
	if got := n.Inventory().Replicas[0]; got.Path != PathParked || got.Device != "GPU-a" {
		t.Errorf("replica %+v", got)
	}
	if info := n.Inventory().Devices[0]; info.Reserved != 8*gib || info.Free != 2*gib || info.Parked != 0 {
		t.Errorf("device %+v", info)
	}
	other := s // it is no key stage, and takes a whole device
	other.Function, other.DeviceMemory = "g.ns", 0
	if whole := n.on("whole", "GPU-b", other); whole.Path != PathFork {
		t.Errorf("path %s of another function", whole.Path)
	}
	proctest.Gone(t, pids["GPU-b"])
	n.parkedOn()
	if err := n.Stop(t.Context(), "whole", time.Second); err != nil {
		t.Fatal(err)
	}
	pids = n.parkedOn("GPU-b")
	r.change("GPU-b", func(d *Device) { d.Unhealthy = "it is lost" })
	proctest.Gone(t, pids["GPU-b"])
	r.change("GPU-b", func(d *Device) { d.Unhealthy = "" })
	pids = n.parkedOn("GPU-b")
	n.keyStages() // the function is no key stage any more
	proctest.Gone(t, pids["GPU-b"])
	if n.spare(n.zygote()) == 0 || len(n.exits) != 1 {
		t.Errorf("%d ends were told, want that of one replica", len(n.exits))
	}
}

// TestOrdersGetParkedChildrenOfTheirDevice checks that an order gets a parked child only if the
// child lives and waits on exactly the devices of the order.
func TestOrdersGetParkedChildrenOfTheirDevice(t *testing.T) {
	n, _, s := parking(t, nil, "GPU-a", "GPU-b")
	n.keyStages(s)
	pids := n.parkedOn("GPU-a", "GPU-b")
	if r := n.on("both", "GPU-a,GPU-b", s); r.Path != PathFork {
		t.Errorf("on two devices: path %s", r.Path)
	}
	if err := syscall.Kill(pids["GPU-a"], syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	proctest.Until(t, "its end to be heard of", func() bool {
		return !waits(n.only(), pids["GPU-a"])
	})
	next := n.parkedOn("GPU-a", "GPU-b")
	if next["GPU-a"] == pids["GPU-a"] || next["GPU-b"] != pids["GPU-b"] {
		t.Errorf("parked %v after %v", next, pids)
	}
	if r := n.on("one", "GPU-b", s); r.PID != pids["GPU-b"] {
		t.Errorf("process %d, want %d", r.PID, pids["GPU-b"])
	}
	if len(n.exits) > 0 {
		t.Errorf("exit %+v", <-n.exits)
	}
}

// TestADeviceWithoutRoomForAContext has a device on which no child can be parked. Replicas start
// there without a parked child.
func TestADeviceWithoutRoomForAContext(t *testing.T) {
	n, _, s := parking(t, nil, "GPU-bad", "GPU-good")
	n.keyStages(s)
	n.parkedOn("GPU-good")
	z := n.only()
	proctest.Until(t, "it to have failed twice", func() bool {
		child := z.Family.Waiting()["GPU-bad"]
		return child.Failures >= 2 && !child.Coming
	})
	if r := n.on("r", "GPU-bad", s); r.Path != PathFork {
		t.Errorf("path %s", r.Path)
	}
}

// TestAChildIsParkedOnceItSaysSo has a child that is still being parked. Its memory counts, but it
// is not reported as parked, and no replica waits for it.
func TestAChildIsParkedOnceItSaysSo(t *testing.T) {
	n, _, s := parking(t, nil, "GPU-slow")
	n.keyStages(s)
	proctest.Until(t, "a child that makes itself ready", func() bool {
		z := n.only()
		return z != nil && z.Family.Parked()["GPU-slow"].PID != 0
	})
	if d := n.Inventory().Devices[0]; d.Parked != resources.ContextOverhead || len(d.ParkedFor) > 0 {
		t.Errorf("device %+v, want %d kept for a child that is not there yet", d, resources.ContextOverhead)
	}
	if r := n.on("r", "GPU-slow", s); r.Path != PathFork {
		t.Errorf("path %s", r.Path)
	}
}

// TestParkedChildrenGoFirst checks that parked children are dismissed before any zygote is evicted
// when memory is short.
func TestParkedChildrenGoFirst(t *testing.T) {
	g := &gauge{Meter: resources.NewKernel("")}
	g.set(resources.Bound{Name: resources.BoundMachine, Total: 100 * gb, Used: gb})
	n, _, s := parking(t, func(c *Config) { c.meter = g }, "GPU-a")
	n.keyStages(s)
	pid := n.parkedOn("GPU-a")["GPU-a"]
	if inv := n.press(g, 86*gb); len(inv.Zygotes) != 1 || inv.Evictions != 0 {
		t.Errorf("inventory %+v, want the zygote", inv)
	}
	proctest.Gone(t, pid)
	n.parkedOn()
	if inv := n.press(g, 87*gb); inv.Evicted.Pressure != 1 {
		t.Errorf("inventory %+v, want its zygote evicted now", inv)
	}
}

// TestWhatParkedChildrenGiveBack checks that dismissed children free only the memory that they do
// not share with their zygote.
func TestWhatParkedChildrenGiveBack(t *testing.T) {
	f := &faker{Meter: resources.NewKernel("")}
	n, _, s := parking(t, func(c *Config) { c.meter = f }, "GPU-a")
	n.keyStages(s)
	pid, z := n.parkedOn("GPU-a")["GPU-a"], n.only()
	f.set(map[int]int64{z.PID: 5 * gb, pid: 6 * gb})
	give := func() (int, int64) {
		n.store.mu.Lock()
		defer n.store.mu.Unlock()
		return n.store.unparkAll()
	}
	if n, bytes := give(); n != 1 || bytes != gb {
		t.Errorf("%d children give back %d bytes, want 1 and %d", n, bytes, gb)
	}
	if n, bytes := give(); n != 0 || bytes != 0 {
		t.Errorf("%d more give back %d bytes, want none", n, bytes)
	}
	proctest.Gone(t, pid)
}

// TestALoadTakesTheMemoryOfParkedChildren checks that a load dismisses parked children, and evicts
// no zygote if that frees enough.
func TestALoadTakesTheMemoryOfParkedChildren(t *testing.T) {
	g := &gauge{Meter: resources.NewKernel("")}
	g.set(resources.Bound{Name: resources.BoundMachine, Total: 100 * gb, Used: gb})
	f := &faker{Meter: g}
	n, _, s := parking(t, func(c *Config) { c.meter = f }, "GPU-a")
	n.keyStages(s)
	pid, z := n.parkedOn("GPU-a")["GPU-a"], n.only()
	f.set(map[int]int64{z.PID: 5 * gb, pid: 6 * gb})
	other := s
	other.Function, other.Namespace, other.Devices, other.DeviceMemory = "f.other", "other", 0, 0
	image, err := n.cfg.Images.Resolve(other.Image)
	if err != nil {
		t.Fatal(err)
	}
	n.store.mu.Lock()
	key := n.store.key(other, python, image)
	n.store.uses[other.Function], n.store.sizes[key] = key, 10*gb
	n.store.mu.Unlock()
	n.press(g, 75*gb+gb/2) // half a gigabyte too much for the load, which the child frees
	if _, err := n.Load(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	proctest.Gone(t, pid)
	if inv := n.Inventory(); inv.Evictions != 0 || inv.Refused != 0 || len(inv.Zygotes) != 2 {
		t.Errorf("%d evictions, %d refused, %d zygotes; want both zygotes", inv.Evictions, inv.Refused, len(inv.Zygotes))
	}
}

// TestParkedChildrenAreNotAdopted checks that parked children end with their manager. The next
// manager parks others once it knows the key stages.
func TestParkedChildrenAreNotAdopted(t *testing.T) {
	g, w := groups(t), wardenOf(t)
	change := func(c *Config) { c.Groups, c.Warden = g, w }
	n, _, s := parking(t, change, "GPU-a")
	n.keyStages(s)
	n.parkedOn("GPU-a")
	r := n.on("kept", "GPU-a", s)
	next := n.parkedOn("GPU-a")["GPU-a"]
	n.Detach()
	proctest.Gone(t, next)
	n, _, s = parking(t, change, "GPU-a")
	if got := n.Inventory().Replicas; len(got) != 1 || got[0].PID != r.PID || got[0].Path != PathParked {
		t.Errorf("adopted %+v, want process %d", got, r.PID)
	}
	n.spare(n.zygote())
	n.parkedOn()
	n.keyStages(s)
	n.parkedOn("GPU-a")
	proctest.Until(t, "the groups of a zygote, a replica, a spare and a parked child", func() bool {
		names, err := g.Names()
		return err == nil && len(names) == 4
	})
}
