package keysmanager

import (
	"errors"
	"fmt"
	"net"
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

// anyImage is an image whose folder is empty.
type anyImage struct{ root string }

func (i anyImage) Resolve(name string) (sandbox.Image, error) {
	return sandbox.Image{Name: name, Root: i.root, Digest: "d", Stage: true}, nil
}

// onDevices returns a node with two devices of 10 GiB.
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

// TestDevicesAreReserved starts and stops many processes at the same time. No more processes may
// start than fit into the devices' memory. In the end, all of that memory must be free.
func TestDevicesAreReserved(t *testing.T) {
	n := onDevices(t)
	spec := node.Spec{Function: "f.ns", Namespace: "ns", Image: "i", Process: "sleep 600", DeviceMemory: 3 * gib}
	for range 2 { // the second round checks that everything was freed
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

// TestDevicesAreSeenByTheirOwners checks that a replica's environment names its devices, whatever
// its function's environment says.
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
