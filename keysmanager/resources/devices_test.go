package resources

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
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
	has := func(replica string, pid int, bytes int64) Holder {
		return Holder{Replica: replica, PID: pid, Reserved: map[string]int64{"GPU-a": bytes}}
	}
	for name, tc := range map[string]struct {
		seen    []Device
		holders []Holder
		ids     string
		bytes   int64
		want    int64 // of each; 0: refused
		refused string
	}{
		"fits":                              {[]Device{gpu}, nil, "GPU-a", 40 * gib, 40 * gib, ""},
		"too large":                         {[]Device{gpu}, nil, "GPU-a", 41 * gib, 0, "want 41 GiB, and 40 GiB of 40 GiB are free"},
		"beside another":                    {[]Device{gpu}, []Holder{has("r", 0, 30*gib)}, "GPU-a", 10 * gib, 10 * gib, ""},
		"no room beside another":            {[]Device{gpu}, []Holder{has("r", 0, 31*gib)}, "GPU-a", 10 * gib, 0, "9 GiB of 40 GiB are free: 31 GiB are reserved for 1 replicas, 0 B are in use"},
		"what replicas use is not foreign":  {[]Device{used(30*gib, map[int]int64{7: 30 * gib})}, []Holder{has("r", 7, 30*gib)}, "GPU-a", 10 * gib, 10 * gib, ""},
		"a replica uses more than it may":   {[]Device{used(35*gib, map[int]int64{7: 35 * gib})}, []Holder{has("r", 7, 30*gib)}, "GPU-a", 6 * gib, 0, "5 GiB of 40 GiB are free"},
		"somebody else uses it":             {[]Device{used(20*gib, map[int]int64{9: 20 * gib})}, []Holder{has("r", 7, 15*gib)}, "GPU-a", 6 * gib, 0, "5 GiB of 40 GiB are free"},
		"nobody is said to use it":          {[]Device{used(20*gib, nil)}, []Holder{has("r", 7, 15*gib)}, "GPU-a", 6 * gib, 0, "5 GiB of 40 GiB are free"},
		"one without a reservation uses it": {[]Device{used(20*gib, map[int]int64{7: 20 * gib})}, []Holder{{Replica: "r", PID: 7}}, "GPU-a", 21 * gib, 0, "20 GiB of 40 GiB are free"},
		"whole":                             {[]Device{gpu}, nil, "GPU-a", 0, 40 * gib, ""},
		"whole, but for a display":          {[]Device{used(2*gib, nil)}, nil, "GPU-a", 0, 38 * gib, ""},
		"whole, but somebody else uses it":  {[]Device{used(3*gib, nil)}, nil, "GPU-a", 0, 0, "want 37.5 GiB, and 37 GiB of 40 GiB are free"},
		"whole, but a small one is there":   {[]Device{gpu}, []Holder{has("r", 0, 1)}, "GPU-a", 0, 0, "reserved for 1 replicas"},
		"beside one that has it whole":      {[]Device{gpu}, []Holder{has("r", 0, 40*gib)}, "GPU-a", 1, 0, "0 B of 40 GiB are free"},
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

// TestChildrenOfReplicas checks that the device memory of a replica's child counts as the
// replica's, as when a watchdog runs a program on a device.
func TestChildrenOfReplicas(t *testing.T) {
	parents := map[int]int{30: 20, 20: 7, 99: 1}
	seen := []Device{{ID: "GPU-a", Memory: 40 * gib, Used: 12 * gib, Processes: map[int]int64{30: 10 * gib, 99: 2 * gib}}}
	all := survey(seen, []Holder{{Replica: "r", PID: 7, Reserved: map[string]int64{"GPU-a": 10 * gib}}}, func(pid int) int { return parents[pid] })
	if got, want := all[0].Free, 28*gib; got != want {
		t.Errorf("%d bytes free, want %d: the child's 10 GiB are reserved, 2 GiB are another's", got, want)
	}
	if self := os.Getpid(); ParentOf(self) != os.Getppid() || ParentOf(1<<30) != 0 {
		t.Errorf("the parent of %d is %d, want %d", self, ParentOf(self), os.Getppid())
	}
}

// TestNeverOverbooked starts and ends replicas at random, which use parts of their reservations.
// Other programs take and free memory that is not reserved. The reservations and these programs
// must always fit on the device together.
func TestNeverOverbooked(t *testing.T) {
	for seed := range uint64(50) {
		r := rand.New(rand.NewPCG(seed, 1))
		seen := []Device{{ID: "GPU-a", Memory: 40 * gib}, {ID: "GPU-b", Memory: 10 * gib}}
		var holders []Holder
		foreign := map[string]int64{}
		started, refused := 0, 0
		promised := func(id string) (sum int64) {
			for _, h := range holders {
				sum += h.Reserved[id]
			}
			return sum
		}
		look := func() { // each replica uses some of its share
			for i := range seen {
				d := &seen[i]
				d.Used, d.Processes = foreign[d.ID], map[int]int64{}
				for _, h := range holders {
					if bytes := h.Reserved[d.ID]; bytes > 0 {
						d.Processes[h.PID] = r.Int64N(bytes + 1)
						d.Used += d.Processes[h.PID]
					}
				}
			}
		}
		for step := range 400 {
			switch r.IntN(6) {
			case 0: // a replica ends; the latest survey still counts its use
				if n := len(holders); n > 0 {
					i := r.IntN(n)
					holders = slices.Delete(holders, i, i+1)
				}
			case 1: // others take unreserved memory, or free some
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
				holders = append(holders, Holder{Replica: fmt.Sprint("r", step), PID: 1000 + step, Reserved: got})
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

// TestWhoHasADevice checks that parked children give way, and that the context and the replicas of
// a worker share the use of their process.
func TestWhoHasADevice(t *testing.T) {
	reserved := func(bytes int64) map[string]int64 { return map[string]int64{"GPU-a": bytes} }
	for name, tc := range map[string]struct {
		used                   map[int]int64
		holders                []Holder
		reserved, free, parked int64
		names                  []string
	}{
		"a parked child":                   {nil, []Holder{{PID: 7, Reserved: reserved(gib), Parks: true, Parked: "f"}}, 0, 40 * gib, gib, nil},
		"one that uses more":               {map[int]int64{7: 2 * gib}, []Holder{{PID: 7, Reserved: reserved(gib), Parks: true, Parked: "f"}}, 0, 40 * gib, 2 * gib, nil},
		"one that is about to be":          {map[int]int64{7: gib / 2}, []Holder{{PID: 7, Reserved: reserved(gib), Parks: true}}, 0, 40 * gib, gib, nil},
		"beside a stranger":                {map[int]int64{7: 2 * gib, 9: gib}, []Holder{{PID: 7, Reserved: reserved(gib), Parks: true, Parked: "f"}}, 0, 39 * gib, 2 * gib, nil},
		"a worker":                         {nil, []Holder{{Replica: "r", PID: 7, Reserved: reserved(4 * gib)}, {PID: 7, Reserved: reserved(gib)}}, 5 * gib, 35 * gib, 0, []string{"r"}},
		"a worker that uses what it may":   {map[int]int64{7: 9 * gib}, []Holder{{Replica: "r", PID: 7, Reserved: reserved(4 * gib)}, {Replica: "s", PID: 7, Reserved: reserved(4 * gib)}, {PID: 7, Reserved: reserved(gib)}}, 9 * gib, 31 * gib, 0, []string{"r", "s"}},
		"a worker that uses more":          {map[int]int64{7: 12 * gib}, []Holder{{Replica: "r", PID: 7, Reserved: reserved(4 * gib)}, {Replica: "s", PID: 7, Reserved: reserved(4 * gib)}, {PID: 7, Reserved: reserved(gib)}}, 9 * gib, 28 * gib, 0, []string{"r", "s"}},
		"a worker without replicas":        {map[int]int64{7: gib / 2}, []Holder{{PID: 7, Reserved: reserved(gib)}}, gib, 39 * gib, 0, nil},
		"a worker one of whose is to come": {map[int]int64{7: 5 * gib}, []Holder{{Replica: "r", PID: 7, Reserved: reserved(4 * gib)}, {Replica: "s", Reserved: reserved(4 * gib)}, {PID: 7, Reserved: reserved(gib)}}, 9 * gib, 31 * gib, 0, []string{"r", "s"}},
	} {
		d := Device{ID: "GPU-a", Memory: 40 * gib, Processes: tc.used}
		for _, bytes := range tc.used {
			d.Used += bytes
		}
		got := survey([]Device{d}, tc.holders, orphan)[0]
		var there []string
		for _, h := range tc.holders {
			if h.Parked != "" {
				there = append(there, h.Parked)
			}
		}
		if !slices.Equal(got.ParkedFor, there) {
			t.Errorf("%s: parked for %q, want %q", name, got.ParkedFor, there)
		}
		if got.Reserved != tc.reserved || got.Free != tc.free || got.Parked != tc.parked || !slices.Equal(got.Replicas, tc.names) {
			t.Errorf("%s: reserved %s, free %s, parked %s, replicas %q; want %s, %s, %s, %q", name, plan.Size(got.Reserved), plan.Size(got.Free), plan.Size(got.Parked), got.Replicas,
				plan.Size(tc.reserved), plan.Size(tc.free), plan.Size(tc.parked), tc.names)
		}
	}
}

// TestWhereChildrenMayPark checks that children are parked only on healthy devices on which a
// replica still fits.
func TestWhereChildrenMayPark(t *testing.T) {
	for name, tc := range map[string]struct {
		d     DeviceInfo
		bytes int64
		want  bool
	}{
		"free":                     {DeviceInfo{Free: 40 * gib}, 30 * gib, true},
		"too little":               {DeviceInfo{Free: 20 * gib}, 30 * gib, false},
		"beside others":            {DeviceInfo{Free: 20 * gib, Replicas: []string{"r"}}, 20 * gib, true},
		"whole":                    {DeviceInfo{Free: 40 * gib}, 0, true},
		"whole, and somebody's":    {DeviceInfo{Free: 39 * gib, Replicas: []string{"r"}}, 0, false},
		"ill":                      {DeviceInfo{Device: Device{Unhealthy: "lost"}, Free: 40 * gib}, gib, false},
		"full of those who parked": {DeviceInfo{Free: gib, Parked: gib - 1}, 1, false},
		"room for one more":        {DeviceInfo{Free: 2 * gib, Parked: gib}, gib, true},
	} {
		tc.d.Memory = 40 * gib
		if got := tc.d.Takes(tc.bytes); got != tc.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
