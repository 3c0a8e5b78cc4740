package keysmanager

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

const gib = int64(1 << 30)

func orphan(int) int { return 0 }

func TestReserve(t *testing.T) {
	gpu := Device{ID: "GPU-a", Memory: 40 * gib}
	ill := Device{ID: "GPU-b", Memory: 40 * gib, Unhealthy: "it is lost"}
	used := func(bytes int64, by map[int]int64) Device {
		d := gpu
		d.Used, d.Processes = bytes, by
		return d
	}
	has := func(replica string, pid int, bytes int64) holder {
		return holder{replica: replica, pid: pid, reserved: map[string]int64{"GPU-a": bytes}}
	}
	for name, tc := range map[string]struct {
		seen    []Device
		holders []holder
		ids     string
		bytes   int64
		want    int64 // of each; 0: refused
		refused string
	}{
		"fits":                              {[]Device{gpu}, nil, "GPU-a", 40 * gib, 40 * gib, ""},
		"too large":                         {[]Device{gpu}, nil, "GPU-a", 41 * gib, 0, "want 41 GiB, and 40 GiB of 40 GiB are free"},
		"beside another":                    {[]Device{gpu}, []holder{has("r", 0, 30*gib)}, "GPU-a", 10 * gib, 10 * gib, ""},
		"no room beside another":            {[]Device{gpu}, []holder{has("r", 0, 31*gib)}, "GPU-a", 10 * gib, 0, "9 GiB of 40 GiB are free: 31 GiB are reserved for 1 replicas, 0 B are in use"},
		"what replicas use is not foreign":  {[]Device{used(30*gib, map[int]int64{7: 30 * gib})}, []holder{has("r", 7, 30*gib)}, "GPU-a", 10 * gib, 10 * gib, ""},
		"a replica uses more than it may":   {[]Device{used(35*gib, map[int]int64{7: 35 * gib})}, []holder{has("r", 7, 30*gib)}, "GPU-a", 6 * gib, 0, "5 GiB of 40 GiB are free"},
		"somebody else uses it":             {[]Device{used(20*gib, map[int]int64{9: 20 * gib})}, []holder{has("r", 7, 15*gib)}, "GPU-a", 6 * gib, 0, "5 GiB of 40 GiB are free"},
		"nobody is said to use it":          {[]Device{used(20*gib, nil)}, []holder{has("r", 7, 15*gib)}, "GPU-a", 6 * gib, 0, "5 GiB of 40 GiB are free"},
		"one without a reservation uses it": {[]Device{used(20*gib, map[int]int64{7: 20 * gib})}, []holder{{replica: "r", pid: 7}}, "GPU-a", 21 * gib, 0, "20 GiB of 40 GiB are free"},
		"whole":                             {[]Device{gpu}, nil, "GPU-a", 0, 40 * gib, ""},
		"whole, but for a display":          {[]Device{used(2*gib, nil)}, nil, "GPU-a", 0, 38 * gib, ""},
		"whole, but somebody else uses it":  {[]Device{used(3*gib, nil)}, nil, "GPU-a", 0, 0, "want 37.5 GiB, and 37 GiB of 40 GiB are free"},
		"whole, but a small one is there":   {[]Device{gpu}, []holder{has("r", 0, 1)}, "GPU-a", 0, 0, "reserved for 1 replicas"},
		"beside one that has it whole":      {[]Device{gpu}, []holder{has("r", 0, 40*gib)}, "GPU-a", 1, 0, "0 B of 40 GiB are free"},
		"not there":                         {[]Device{gpu}, nil, "GPU-x", 1, 0, `device "GPU-x": cannot be reserved: this node does not have it`},
		"not well":                          {[]Device{gpu, ill}, nil, "GPU-b", 1, 0, "it is not well: it is lost"},
		"twice":                             {[]Device{gpu}, nil, "GPU-a,GPU-a", 1, 0, "asked for twice"},
		"one of two is not well":            {[]Device{gpu, ill}, nil, "GPU-a,GPU-b", 1, 0, "not well"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := reserve(survey(tc.seen, tc.holders, orphan), strings.Split(tc.ids, ","), tc.bytes)
			switch {
			case tc.want == 0 && (!errors.Is(err, ErrDevice) || !strings.Contains(err.Error(), tc.refused)):
				t.Errorf("got %v, %v, want an error with %q", got, err, tc.refused)
			case tc.want > 0 && (err != nil || !maps.Equal(got, map[string]int64{tc.ids: tc.want})):
				t.Errorf("got %v, %v, want %d", got, err, tc.want)
			}
		})
	}
}

// TestChildrenOfReplicas: what a replica's child uses is the replica's, as when a watchdog runs a program on a device.
func TestChildrenOfReplicas(t *testing.T) {
	parents := map[int]int{30: 20, 20: 7, 99: 1}
	seen := []Device{{ID: "GPU-a", Memory: 40 * gib, Used: 12 * gib, Processes: map[int]int64{30: 10 * gib, 99: 2 * gib}}}
	all := survey(seen, []holder{{replica: "r", pid: 7, reserved: map[string]int64{"GPU-a": 10 * gib}}}, func(pid int) int { return parents[pid] })
	if got, want := all[0].Free, 28*gib; got != want {
		t.Errorf("%d bytes free, want %d: the child's 10 GiB are reserved, 2 GiB are another's", got, want)
	}
	if self := os.Getpid(); parentOf(self) != os.Getppid() || parentOf(1<<30) != 0 {
		t.Errorf("the parent of %d is %d, want %d", self, parentOf(self), os.Getppid())
	}
}

// TestNeverOverbooked lets replicas come, grow as far as they may and go at random, beside programs of others that do as they like: as
// long as those leave the reservations alone, all that is used fits, whoever uses it.
func TestNeverOverbooked(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		seen := []Device{{ID: "GPU-a", Memory: 40 * gib}, {ID: "GPU-b", Memory: 10 * gib}}
		var holders []holder
		foreign := map[string]int64{}
		started, refused := 0, 0
		promised := func(id string) (sum int64) {
			for _, h := range holders {
				sum += h.reserved[id]
			}
			return sum
		}
		look := func() { // each replica uses some of its share
			for i := range seen {
				d := &seen[i]
				d.Used, d.Processes = foreign[d.ID], map[int]int64{}
				for _, h := range holders {
					if bytes := h.reserved[d.ID]; bytes > 0 {
						d.Processes[h.pid] = r.Int64N(bytes + 1)
						d.Used += d.Processes[h.pid]
					}
				}
			}
		}
		for step := range 400 {
			switch r.IntN(6) {
			case 0: // a replica ends; the latest look still has what it used
				if n := len(holders); n > 0 {
					i := r.IntN(n)
					holders = slices.Delete(holders, i, i+1)
				}
			case 1: // others take what nobody has reserved, or give some back
				d := seen[r.IntN(len(seen))]
				foreign[d.ID] = r.Int64N(d.Memory - promised(d.ID) + 1)
				look()
			case 2:
				look()
			default:
				ids := []string{"GPU-a", "GPU-b"}[r.IntN(2):][:1]
				if r.IntN(8) == 0 {
					ids = []string{"GPU-a", "GPU-b"}
				}
				bytes := 1 + r.Int64N(12*gib)
				if r.IntN(8) == 0 {
					bytes = 0
				}
				got, err := reserve(survey(seen, holders, orphan), ids, bytes)
				if err != nil {
					refused++
					continue
				}
				started++
				holders = append(holders, holder{replica: fmt.Sprint("r", step), pid: 1000 + step, reserved: got})
			}
			for _, d := range seen {
				if sum := foreign[d.ID] + promised(d.ID); sum > d.Memory {
					t.Fatalf("seed %d, step %d: %d bytes of %s are promised or used, which has %d", seed, step, sum, d.ID, d.Memory)
				}
			}
		}
		if started < 10 || refused < 10 {
			t.Fatalf("seed %d: %d started and %d refused, want some of both", seed, started, refused)
		}
	}
}

// anyImage is an image whose folder is empty.
type anyImage struct{ root string }

func (i anyImage) Resolve(name string) (sandbox.Image, error) {
	return sandbox.Image{Name: name, Root: i.root, Digest: "d", Stage: true}, nil
}

// onDevices is a node with two devices of 10 GiB.
func onDevices(t *testing.T) *rig {
	t.Helper()
	return newNode(t, func(c *Config) {
		c.Images = anyImage{t.TempDir()}
		c.Devices = func() []Device {
			return []Device{{ID: "GPU-b", Memory: 10 * gib}, {ID: "GPU-a", Memory: 10 * gib}}
		}
	})
}

func (n *rig) reserved() (bytes int64, replicas int) {
	for _, d := range n.Inventory().Devices {
		bytes += d.Reserved
		replicas += len(d.Replicas)
		if d.Reserved > d.Memory || d.Free != d.Memory-d.Reserved {
			n.t.Errorf("device %+v", d)
		}
	}
	return bytes, replicas
}

// TestDevicesAreReserved starts and stops processes, many at a time: never more than fit, and all is given back.
func TestDevicesAreReserved(t *testing.T) {
	n := onDevices(t)
	spec := node.Spec{Function: "f.ns", Namespace: "ns", Image: "i", Process: "sleep 600", DeviceMemory: 3 * gib}
	for range 2 { // the second round finds everything given back
		var wg sync.WaitGroup
		var started, refused, odd atomic.Int64
		conns := make(chan net.Conn, 40)
		for i := range 40 {
			wg.Go(func() {
				o := node.Order{Replica: fmt.Sprint("r", i), Spec: spec, Device: []string{"GPU-a", "GPU-b"}[i%2]}
				r, err := n.Start(t.Context(), o)
				switch {
				case err == nil:
					started.Add(1)
					conns <- r.Conn
				case errors.Is(err, ErrDevice) && strings.Contains(err.Error(), "want 3 GiB, and 1 GiB of 10 GiB are free: 9 GiB are reserved for 3 replicas"):
					refused.Add(1)
				default:
					odd.Add(1)
					t.Error(err)
				}
				n.reserved()
			})
		}
		wg.Wait()
		if started.Load() != 6 || refused.Load() != 34 {
			t.Errorf("%d started, %d refused, %d else, want 6 and 34", started.Load(), refused.Load(), odd.Load())
		}
		if bytes, replicas := n.reserved(); bytes != 18*gib || replicas != 6 {
			t.Errorf("%d bytes are reserved for %d replicas, want 18 GiB for 6", bytes, replicas)
		}
		close(conns)
		for c := range conns {
			_ = c.Close()
		}
		for _, r := range n.Inventory().Replicas {
			if r.Device == "" {
				t.Errorf("replica %+v, want its device", r)
			}
			wg.Go(func() {
				if err := n.Stop(t.Context(), r.Name, time.Second); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if bytes, replicas := n.reserved(); bytes != 0 || replicas != 0 {
			t.Errorf("%d bytes are still reserved for %d replicas", bytes, replicas)
		}
	}
	spec.Image, spec.Process = "i", "/does/not/exist"
	if _, err := n.Start(t.Context(), node.Order{Replica: "bad", Spec: spec, Device: "GPU-a"}); err == nil {
		t.Error("what is not there was started")
	}
	if bytes, _ := n.reserved(); bytes != 0 {
		t.Errorf("a start that failed keeps %d bytes", bytes)
	}
}

// TestDevicesAreSeenByTheirOwners: a replica's environment names its devices, whatever its function says of that.
func TestDevicesAreSeenByTheirOwners(t *testing.T) {
	n := onDevices(t)
	for replica, device := range map[string]string{"one": "GPU-b", "two": "GPU-a,GPU-b", "none": ""} {
		spec := node.Spec{
			Function: "f.ns", Namespace: "ns", Image: "i", Process: "printenv CUDA_VISIBLE_DEVICES", DeviceMemory: gib,
			Env: map[string]string{"CUDA_VISIBLE_DEVICES": "all"},
		}
		ctx := t.Context()
		r, err := n.Start(ctx, node.Order{Replica: replica, Spec: spec, Device: device})
		if err != nil {
			t.Fatal(err)
		}
		_ = r.Conn.Close()
		proctest.Until(t, "the replica to have said what it sees", func() bool {
			n.printing.Lock()
			defer n.printing.Unlock()
			return slices.Equal(n.lines[replica], []string{"stdout: " + device})
		})
	}
}
