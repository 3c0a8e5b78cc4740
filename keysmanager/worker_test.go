package keysmanager

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// actWorks runs a worker whose threads wait for the end of their stage sockets. Thread ids begin
// with the given one.
func actWorks(first string) error {
	fd, err := strconv.Atoi(os.Getenv(wire.EnvZygoteFD))
	if err != nil || os.Getenv(wire.EnvWorker) == "" {
		return fmt.Errorf("a zygote: %w", err)
	}
	conn, err := unixConn(os.NewFile(uintptr(fd), "control"))
	if err != nil {
		return err
	}
	id, err := strconv.Atoi(first)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	stages, killed := map[uint32]net.Conn{}, map[uint32]bool{} // by id
	say := func(o wire.Order) {
		o.Version = wire.OrderVersion
		_, _ = conn.Write(wire.AppendOrder(nil, o)) // fails if nobody listens
	}
	serve := func(id uint32, gate *net.UnixConn) {
		defer gate.Close()
		status := uint32(0)
		if o, files, err := receiveFiles(gate); err == nil {
			fmt.Fprintln(files[1], slices.DeleteFunc(o.Env, func(kv string) bool { return !strings.HasPrefix(kv, wire.EnvStageRoot+"=") }))
			stage, err := unixConn(files[0])
			if err != nil {
				panic(err)
			}
			resources.CloseFiles(files)
			mu.Lock()
			if stages[id] = stage; killed[id] {
				_ = stage.Close()
			}
			mu.Unlock()
			if _, err = io.Copy(io.Discard, stage); err != nil {
				status = uint32(syscall.SIGKILL)
			}
		}
		say(wire.Order{Kind: wire.ChildExited, PID: id, Status: status})
	}
	say(wire.Order{Kind: wire.ZygoteReady, PID: uint32(os.Getpid())})
	for {
		o, files, err := receiveFiles(conn)
		switch {
		case err != nil:
			return err
		case o.Kind == wire.OrderKill:
			mu.Lock()
			killed[o.PID] = true
			if c := stages[o.PID]; c != nil {
				_ = c.Close()
			}
			mu.Unlock()
		case o.Kind == wire.OrderFork:
			gate, err := unixConn(files[0])
			if err != nil {
				return err
			}
			resources.CloseFiles(files)
			say(wire.Order{Kind: wire.ChildForked, ID: o.ID, PID: uint32(id)})
			go serve(uint32(id), gate) // ends with the worker at the latest
			id++
		}
	}
}

// workers returns a node with two devices of 10 GiB, and a function whose replicas are in a worker.
func workers(t *testing.T, change func(*Config)) (*rig, *rack, node.Spec) {
	t.Helper()
	n, r, s := parking(t, change, "GPU-a", "GPU-b")
	s.Worker, s.Process = "shared", os.Args[0]+" "+actAs+" works 4194400"
	return n, r, s
}

// worker waits until there is one worker on a device, and returns it.
func (n *rig) worker(device string) (z ZygoteInfo) {
	n.t.Helper()
	proctest.Until(n.t, "one worker on "+device, func() bool {
		count := 0
		for _, one := range n.Inventory().Zygotes {
			if one.Worker != "" && one.Device == device && one.State == Ready {
				z = one
				count++
			}
		}
		return count == 1
	})
	return z
}

// TestReplicasShareAWorkerPerDevice checks that replicas are threads of one process per device and
// worker name, for all functions of a namespace that name the worker.
func TestReplicasShareAWorkerPerDevice(t *testing.T) {
	n, _, s := workers(t, nil)
	other := s
	other.Function = "g.ns"
	a, b, c := n.on("a", "GPU-a", s), n.on("b", "GPU-a", other), n.on("c", "GPU-b", s)
	if a.PID != b.PID || a.PID == c.PID || a.Path != PathResident || c.Path != PathResident {
		t.Errorf("processes %d, %d, %d, path %s, want one for each device", a.PID, b.PID, c.PID, a.Path)
	}
	root, err := n.cfg.Images.Resolve("i")
	if err != nil || n.printed("a") != "["+wire.EnvStageRoot+"="+root.Root+"]" {
		t.Errorf("it is told %s, want its image's root; %v", n.printed("a"), err)
	}
	z := n.worker("GPU-a")
	if z.PID != a.PID || z.Replicas != 2 || z.Path != PathResident || z.Namespace != "ns" || z.Worker != "shared" || z.Digest != "" || z.Function != "" {
		t.Errorf("worker %+v", z)
	}
	d := n.Inventory().Devices[0]
	if want := 8*gib + int64(resources.ContextOverhead); d.Reserved != want || d.Free != 10*gib-want || !slices.Equal(d.Replicas, []string{"a", "b"}) {
		t.Errorf("device %+v, want %s reserved: two replicas and one context", d, plan.Size(want))
	}
	if _, err := n.Start(t.Context(), node.Order{Replica: "d", Spec: s, Device: "GPU-a"}); !errors.Is(err, ErrDevice) {
		t.Errorf("a third one: %v", err)
	}
	if err := n.SetCPU(t.Context(), "a", 500); !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), `worker "shared"`) {
		t.Errorf("its processor: %v", err)
	}
	if err := n.Stop(t.Context(), "a", time.Minute); err != nil {
		t.Fatal(err)
	}
	if e := n.exit(); e.Replica != "a" || e.PID != a.PID {
		t.Errorf("exit %+v", e)
	}
	if z := n.worker("GPU-a"); z.PID != b.PID || z.Replicas != 1 {
		t.Errorf("worker %+v, want it to go on", z)
	}
	if err := b.Conn.Close(); err != nil {
		t.Fatal(err)
	}
	if e := n.exit(); e.Replica != "b" || e.Cause != resources.ExitedWell {
		t.Errorf("exit %+v", e)
	}
	if d := n.Inventory().Devices[0]; d.Reserved != resources.ContextOverhead || len(d.Replicas) != 0 {
		t.Errorf("device %+v, want its context reserved", d)
	}
	if err := syscall.Kill(c.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if e := n.exit(); e.Replica != "c" || e.Cause != "its worker ended: killed by SIGKILL" || e.End != task.EndUnclear {
		t.Errorf("exit %+v", e)
	}
	if next := n.on("next", "GPU-b", s); next.PID == c.PID { // nothing refuses it
		t.Errorf("it is in process %d, which was killed", next.PID)
	}
}

// TestAWorkerRestsBeforeItEnds checks that a worker without replicas stays for a while, and frees
// its device when it ends.
func TestAWorkerRestsBeforeItEnds(t *testing.T) {
	n, _, s := workers(t, func(c *Config) { c.workerRests = time.Nanosecond })
	r := n.on("a", "GPU-a", s)
	n.loader.tidy()
	n.loader.tidy()
	if n.worker("GPU-a").PID != r.PID {
		t.Error("a worker with replicas has ended")
	}
	if err := n.Stop(t.Context(), "a", time.Minute); err != nil {
		t.Fatal(err)
	}
	proctest.Gone(t, r.PID)
	proctest.Until(t, "nothing to be left", func() bool {
		inv := n.Inventory()
		return len(inv.Zygotes) == 0 && inv.Devices[0].Reserved == 0
	})
	if n.Inventory().Counts != (Counts{Misses: 1}) {
		t.Errorf("counts %+v", n.Inventory().Counts)
	}
	lasting, g := newGauged(t, func(c *Config) { *c = configOf(*c, *n.cfg) })
	lasting.on("b", "", s)
	if err := lasting.Stop(t.Context(), "b", time.Minute); err != nil {
		t.Fatal(err)
	}
	lasting.loader.tidy()
	lasting.worker("")
	if inv := lasting.press(g, 90*gb); len(inv.Zygotes) != 0 || inv.Evicted.Pressure != 1 {
		t.Errorf("memory is short: %+v", inv)
	}
}

// TestADeafWorkerIsEndedAsAWhole checks that a worker that ignores messages is ended as a whole
// when one of its replicas must end.
func TestADeafWorkerIsEndedAsAWhole(t *testing.T) {
	n, _, s := workers(t, func(c *Config) { c.workerEnds = time.Millisecond })
	a := n.on("a", "", s)
	n.on("b", "", s)
	if err := syscall.Kill(a.PID, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	proctest.Until(t, "all threads of the worker to be stopped", func() bool {
		// The pattern is well-formed.
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", a.PID))
		return len(threads) > 0 && !slices.ContainsFunc(threads, func(file string) bool {
			b, err := os.ReadFile(file)
			return err == nil && !bytes.Contains(b, []byte("State:\tT"))
		})
	})
	if err := n.Stop(t.Context(), "a", 0); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if e := n.exit(); e.Cause != fmt.Sprintf(`its worker was ended: replica "a": process %d is still there 1ms after SIGKILL`, a.PID) || e.End != task.EndShared {
			t.Errorf("exit %+v", e)
		}
	}
}

// TestAWorkerIsEvicted evicts workers by the name of a function that they have had replicas of.
// That must end them on all devices, but not while they have replicas.
func TestAWorkerIsEvicted(t *testing.T) {
	n, _, s := workers(t, nil)
	other := s
	other.Function = "g.ns"
	a, b := n.on("a", "GPU-a", s), n.on("b", "GPU-b", s)
	n.on("c", "GPU-b", other)
	for what, want := range map[string]error{"g.ns": ErrBusy, "h.ns": ErrNotCached} {
		if _, err := n.Evict(t.Context(), what); !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	for _, name := range []string{"a", "b", "c"} {
		if err := n.Stop(t.Context(), name, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := n.Evict(t.Context(), "g.ns"); err != nil {
		t.Fatal(err)
	}
	proctest.Gone(t, b.PID)
	if n.worker("GPU-a").PID != a.PID {
		t.Error("another function's worker has ended")
	}
	if _, err := n.Evict(t.Context(), "f.ns"); err != nil {
		t.Fatal(err)
	}
	if inv := n.Inventory(); len(inv.Zygotes) > 0 || inv.Evicted.Asked != 2 {
		t.Errorf("zygotes %+v, %d were evicted, want none and 2", inv.Zygotes, inv.Evicted.Asked)
	}
}

// configOf returns a configuration with the images and devices of another.
func configOf(c, other Config) Config {
	c.Images, c.Devices, c.ORT = other.Images, other.Devices, ""
	return c
}

// TestWhichFunctionsShareAWorker checks which functions share a worker, and which cannot have one.
func TestWhichFunctionsShareAWorker(t *testing.T) {
	s := node.Spec{Function: "f.ns", Namespace: "ns", Worker: "w", Process: "p"}
	m := &starter{pool: resources.NewPool(resources.Config{Networks: new(bareNetworks)})}
	base, err := m.residence(node.Order{Spec: s, Device: "d"}, python)
	if err != nil || base.What() != "worker" || engineByKey(base).name != python.name {
		t.Fatal(base, err)
	}
	for name, change := range map[string]func(*node.Order){
		"namespace": func(o *node.Order) { o.Spec.Namespace = "other" }, "name": func(o *node.Order) { o.Spec.Worker = "x" },
		"interpreter": func(o *node.Order) { o.Spec.Process = "/opt/python ./stage" }, "device": func(o *node.Order) { o.Device = "" },
		"network": func(o *node.Order) { o.Spec.Network = "none" },
	} {
		o := node.Order{Spec: s, Device: "d"}
		change(&o)
		if key, err := m.residence(o, python); err != nil || key == base {
			t.Errorf("another %s: the same worker; %v", name, err)
		}
	}
	same := node.Order{Spec: s, Device: "d"}
	same.Spec.Function, same.Spec.Image, same.Spec.Env, same.Spec.DeviceMemory = "g.ns", "j", map[string]string{"A": "1"}, 7
	if key, err := m.residence(same, python); err != nil || key != base {
		t.Errorf("another function: %+v, %v", key, err)
	}
	start := s
	start.Start = "cold"
	for want, refused := range map[string]func() (zygote.Key, error){
		"a process each": func() (zygote.Key, error) { return m.residence(same, onnxRuntime) },
		"want auto":      func() (zygote.Key, error) { return m.residence(node.Order{Spec: start}, python) },
		"want one":       func() (zygote.Key, error) { return m.residence(node.Order{Spec: s, Device: "a,b"}, python) },
	} {
		if _, err := refused(); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "stagecoach.dev/process is w") {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestALyingWorkerReachesNoOtherProcess has a worker that names somebody else's process as its
// thread. That process must get no signal and stay in its cgroup.
func TestALyingWorkerReachesNoOtherProcess(t *testing.T) {
	victim := exec.Command("sleep", "600")
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = victim.Process.Kill(), victim.Wait() }()
	n, _, s := workers(t, func(c *Config) { c.Groups = groups(t) })
	s.Process = fmt.Sprintf("%s %s works %d", os.Args[0], actAs, victim.Process.Pid)
	before, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", victim.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	r := n.on("a", "", s)
	if r.PID == victim.Process.Pid || n.Inventory().Replicas[0].PID == victim.Process.Pid {
		t.Errorf("the replica is process %d", r.PID)
	}
	if err := n.Stop(t.Context(), "a", 0); err != nil {
		t.Fatal(err)
	}
	if ended, err := syscall.Wait4(victim.Process.Pid, nil, syscall.WNOHANG, nil); ended != 0 || err != nil {
		t.Error("somebody else's process has ended")
	}
	after, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", victim.Process.Pid))
	if err != nil || string(after) != string(before) {
		t.Errorf("it is in %s%v", after, err)
	}
	if names, err := n.cfg.Groups.(realGroups).Names(); err != nil || len(names) != 1 {
		t.Errorf("groups %q, %v, want the worker's", names, err)
	}
}

// TestAWorkersUsageIsSharedEqually checks that a worker's usage is charged to its replicas'
// functions in equal parts, until the functions are forgotten.
func TestAWorkersUsageIsSharedEqually(t *testing.T) {
	n, _, s := workers(t, func(c *Config) { c.Groups = groups(t) })
	other := s
	other.Function = "g.ns"
	n.on("a", "", s)
	n.on("b", "", other)
	z := n.only()
	var all map[string]resources.Used
	proctest.Until(t, "what it uses to be measured", func() bool {
		n.measure()
		all = n.used()
		return all["f.ns"].CPU > 0
	})
	f, g, worker := all["f.ns"], all["g.ns"], z.Held().Group().Usage() // not measured again meanwhile
	if f != g || len(all) != 2 || f.Memory != worker.Memory/2 || f.Memory == 0 || 2*f.CPU > worker.CPU {
		t.Errorf("used %+v, want halves of %+v", all, worker)
	}
	for _, name := range []string{"a", "b"} {
		if err := n.Stop(t.Context(), name, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
	if left := n.used()["f.ns"]; left.Memory != 0 || left.CPU < f.CPU {
		t.Errorf("used %+v after %+v, want its time alone", left, f)
	}
	n.Forget("f.ns")
	n.Forget("g.ns")
	if all := n.used(); len(all) > 0 {
		t.Errorf("used %+v by functions that are gone", all)
	}
}

// TestAWorkerIsCountedOnce checks that a worker's memory counts once, whatever its replicas are.
func TestAWorkerIsCountedOnce(t *testing.T) {
	n, g := newGauged(t, nil)
	z := &zygote.Zygote{Key: zygote.Key{Form: zygote.Worker}, Entry: "e", Facts: zygote.Facts{PID: os.Getpid()}, Family: new(zygote.Family)}
	weighed := resources.NewScale(g, 0).Weigh(0, func() resources.Census {
		return resources.Census{Families: []resources.Family{{Of: z.Parent()}}}
	})
	anonymous, files := g.Resident(os.Getpid())
	if got, want := weighed.Own, anonymous+files; got < want/2 || got > 2*want {
		t.Errorf("it seems to take %d, want about %d", got, want)
	}
	n.store.mu.Lock()
	n.store.fill(z.Key, n.store.hold(z.Key), z)
	n.store.processes["a"] = &process{replica: "a", zygote: z, pid: z.PID, running: true}
	n.store.mu.Unlock()
	all := n.store.census().Families
	n.store.mu.Lock()
	delete(n.store.processes, "a")
	n.store.slots = newSlots()
	n.store.mu.Unlock()
	if len(all) != 2 || all[0].Of != z.Parent() {
		t.Errorf("%d families, want the worker's and those without", len(all))
	}
	if slices.ContainsFunc(all, func(f resources.Family) bool { return len(f.Replicas) > 0 }) {
		t.Errorf("families %+v, want the replicas counted with the worker", all)
	}
}
