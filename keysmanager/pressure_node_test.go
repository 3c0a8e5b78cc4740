package keysmanager

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

const gb = 1 << 30

// gauge is a resources.Meter whose values a test sets.
type gauge struct {
	resources.Meter
	mu  sync.Mutex
	all []resources.Bound
}

func (g *gauge) set(all ...resources.Bound) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.all = all
}

func (g *gauge) Bounds() []resources.Bound {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]resources.Bound(nil), g.all...)
}

// newGauged returns a node whose machine has 100 GB, and uses what the test sets.
func newGauged(t *testing.T, change func(*Config)) (*rig, *gauge) {
	t.Helper()
	g := &gauge{Meter: resources.NewKernel("")}
	g.set(resources.Bound{Name: resources.BoundMachine, Total: 100 * gb, Used: gb})
	return newNode(t, func(c *Config) {
		if c.meter = g; change != nil {
			change(c)
		}
	}), g
}

// press sets the memory that the machine uses, and makes the node sample it.
func (n *rig) press(g *gauge, used int64) Inventory {
	g.set(resources.Bound{Name: resources.BoundMachine, Total: 100 * gb, Used: used})
	n.loader.weigh(0)
	n.loader.tidy()
	return n.Inventory()
}

func TestPressureEvictsIdleZygotes(t *testing.T) {
	evicted := map[string]int64{}
	n, g := newGauged(t, func(c *Config) { c.OnEvict = func(f string, bytes int64) { evicted[f] = bytes } })
	other := withModel
	other.Namespace, other.Function = "other", "f.other"
	n.start("a", withModel)
	if err := n.Warm(t.Context(), []node.Wanted{{Spec: withModel}, {Spec: other, Key: true}}); err != nil {
		t.Fatal(err)
	}
	if inv := n.press(g, 84*gb); len(inv.Zygotes) != 2 || inv.Bound != resources.BoundMachine || inv.Threshold != 85*gb || inv.Free <= 0 || inv.Free > gb {
		t.Errorf("below the threshold: %+v", inv)
	}
	inv := n.press(g, 90*gb)
	if len(inv.Zygotes) != 1 || inv.Zygotes[0].Function != "f.ns" || inv.Zygotes[0].Replicas != 1 {
		t.Errorf("zygotes %+v, want the one with a replica", inv.Zygotes)
	}
	if inv.Evicted.Pressure != 1 || inv.Evicted.Memory != 0 || inv.Evictions != 1 || len(evicted) != 1 || evicted["f.other"] < 1<<20 || inv.Free != 0 {
		t.Errorf("inventory %+v, told %v, want one eviction under pressure", inv, evicted)
	}
	for _, used := range []int64{82 * gb, gb} { // not yet calm; calm for a moment only
		n.press(g, used)
		if err := n.Warm(t.Context(), []node.Wanted{{Spec: withModel}, {Spec: other, Key: true}}); err != nil {
			t.Fatal(err)
		}
		if inv := n.Inventory(); len(inv.Zygotes) != 1 {
			t.Errorf("at %d bytes it was loaded ahead of need: %+v", used, inv.Zygotes)
		}
	}
	n.store.mu.Lock()
	n.store.slots.cache.Step(time.Now().Add(time.Minute), nil) // a while later
	n.store.mu.Unlock()
	if err := n.Warm(t.Context(), []node.Wanted{{Spec: withModel}, {Spec: other}}); err != nil || len(n.Inventory().Zygotes) != 2 {
		t.Errorf("%v, %+v, want it loaded again", err, n.Inventory().Zygotes)
	}
	n.press(g, 81*gb)
	if inv := n.press(g, 86*gb); len(inv.Zygotes) != 1 {
		t.Errorf("zygotes %+v", inv.Zygotes)
	}
	if r := n.start("b", withModel); r.PID == 0 { // a fork from a loaded zygote is never refused
		t.Error("no process")
	}
	if err := n.Stop(t.Context(), "a", time.Minute); err != nil {
		t.Fatal(err)
	}
	// A zygote that becomes idle is evicted.
	if err := n.Stop(t.Context(), "b", time.Minute); err != nil {
		t.Fatal(err)
	}
	proctest.Until(t, "the zygote that became idle to go", func() bool { return len(n.Inventory().Zygotes) == 0 })
}

func TestWhatCannotFitIsRefused(t *testing.T) {
	n, g := newGauged(t, nil)
	n.start("a", withModel)
	other := withModel
	other.Namespace, other.Function = "other", "f.other"
	n.press(g, 85*gb-(4<<20))
	_, err := n.Start(t.Context(), node.Order{Replica: "b", Spec: other})
	if !errors.Is(err, ErrNoRoom) {
		t.Fatalf("got %v, want %v", err, ErrNoRoom)
	}
	for _, want := range []string{`zygote of "f.other" needs about`, "model file 10.3 MiB", "of 85 GiB (85 % of 100 GiB, machine)", "held by zygotes with replicas: f.ns", "used by other processes"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q in it", err, want)
		}
	}
	if err := n.Warm(t.Context(), []node.Wanted{{Spec: other}}); err != nil {
		t.Errorf("what is not loaded ahead of need is no error: %v", err)
	}
	if inv := n.Inventory(); inv.Refused != 1 || len(inv.Failures) != 0 || len(inv.Replicas) != 1 {
		t.Errorf("inventory %+v, want one refusal and no failure", inv)
	}
	n.press(g, 10*gb)
	n.start("b", other) // without a back-off
}

// TestRoomIsMadeForWhoNeedsIt has memory for one zygote, and two functions that want one.
func TestRoomIsMadeForWhoNeedsIt(t *testing.T) {
	n := newNode(t, func(c *Config) { c.Memory = 60 << 20 })
	other := withModel
	other.Namespace, other.Function = "other", "f.other"
	large := func() { // both zygotes are set to take more than half of the memory
		n.store.mu.Lock()
		defer n.store.mu.Unlock()
		image, err := n.cfg.Images.Resolve(withModel.Image)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range []node.Spec{withModel, other} {
			n.store.sizes[n.store.key(s, onnxRuntime, image)] = 45 << 20
		}
	}
	warm := func(key bool) Inventory {
		t.Helper()
		large()
		if err := n.Warm(t.Context(), []node.Wanted{{Spec: withModel, Key: key}, {Spec: other}}); err != nil {
			t.Fatal(err)
		}
		return n.Inventory()
	}
	first := warm(false)
	if len(first.Zygotes) != 1 || first.Evictions != 0 || first.Bound != resources.BoundOwn || first.Memory != 60<<20 {
		t.Fatalf("%+v, want one zygote and no eviction", first)
	}
	for range 3 {
		if inv := warm(false); inv.Evictions != 0 || inv.Zygotes[0].PID != first.Zygotes[0].PID {
			t.Fatalf("%+v, want the zygote that was there", inv)
		}
	}
	large()
	n.start("a", other) // the order gets the memory
	inv := n.Inventory()
	if len(inv.Zygotes) != 1 || inv.Zygotes[0].Function != "f.other" || inv.Evicted.Memory != 1 {
		t.Fatalf("%+v, want f.other's zygote alone", inv)
	}
	large()
	if _, err := n.Start(t.Context(), node.Order{Replica: "b", Spec: withModel}); !errors.Is(err, ErrNoRoom) || !strings.Contains(err.Error(), "(85 % of 60 MiB, --memory)") {
		t.Errorf("beside one with a replica: %v, want %v", err, ErrNoRoom)
	}
	if err := n.Stop(t.Context(), "a", time.Minute); err != nil {
		t.Fatal(err)
	}
	proctest.Until(t, "the replica's memory to be seen to be free", func() bool {
		return warm(true).Evicted.Memory > 1
	})
	for range 3 {
		if inv := warm(true); len(inv.Zygotes) != 1 || inv.Zygotes[0].Function != "f.ns" || !inv.Zygotes[0].Key || inv.Evicted.Memory != 2 {
			t.Fatalf("%+v, want the key stage's zygote", inv)
		}
	}
}

// TestABalloonTakesTheMemory has a replica that grows until the node's share is short.
func TestABalloonTakesTheMemory(t *testing.T) {
	all := images(t)
	s, dir := bad(t, all, "balloon")
	const script = "#!/bin/sh\nf=$(mktemp -u); mkfifo $f; { rm $f; head -c 130000000 /dev/zero; sleep 600; } >$f & exec tail -c 130000000 <$f\n"
	balloon := filepath.Join(dir, "balloon")
	if err := os.WriteFile(balloon, []byte(script), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	s.Process, s.Env = "./balloon", nil
	n := newNode(t, func(c *Config) {
		c.Memory, c.Images = 160<<20, twoFolders{all, sandbox.Images{Dir: filepath.Dir(filepath.Dir(filepath.Dir(dir)))}}
	})
	if err := n.Warm(t.Context(), []node.Wanted{{Spec: withModel}}); err != nil {
		t.Fatal(err)
	}
	n.zygote()
	n.start("balloon", s)
	proctest.Until(t, "the idle zygote to go", func() bool { return len(n.Inventory().Zygotes) == 0 })
	if inv := n.Inventory(); inv.Evicted.Memory != 1 || inv.MemoryUsed < 100<<20 || len(inv.Replicas) != 1 {
		t.Errorf("inventory %+v, want an eviction, and the balloon", inv)
	}
}

// TestALoadCountsOnce checks that the memory of a load counts once: what the load has already taken
// is not reserved for it again.
func TestALoadCountsOnce(t *testing.T) {
	n, g := newGauged(t, nil)
	g.Meter = &faker{own: map[int]int64{7: 3 * gb, 8: 3 * gb}}
	n.store.mu.Lock()
	for pid, bytes := range map[int]int64{7: 4 * gb, 8: 2 * gb, 0: gb} {
		key := zygote.Key{Model: fmt.Sprint(pid)}
		s := n.store.hold(key)
		s.pid, s.loading, s.need = pid, make(chan struct{}), need{bytes: bytes}
		n.store.step(cache.Want[zygote.Key]{Key: key, Bytes: bytes})
	}
	n.store.mu.Unlock()
	if inv := n.press(g, 20*gb); inv.Free != (85-20+3+2-4-2-1)*gb || inv.MemoryUsed != (20-3-2)*gb {
		t.Errorf("%d bytes are free and %d used, want %d and %d", inv.Free, inv.MemoryUsed, 63*gb, 15*gb)
	}
	n.store.mu.Lock()
	n.store.slots = newSlots()
	n.store.mu.Unlock()
}

// faker is a resources.Meter of processes whose memory a test sets.
type faker struct {
	resources.Meter
	mu  sync.Mutex
	own map[int]int64
}

func (f *faker) set(own map[int]int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.own = own
}

// Resident implements resources.Meter.
func (f *faker) Resident(pid int) (anonymous, files int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.own[pid], 0
}
