package keysmanager

import (
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"
)

// plain is memory with one bound, of which 85 % are limit.
func plain(limit, used int64) memory {
	return memory{bounds: []bound{{boundOwn, limit * 100 / 85, used}}}
}

func keysOf(digests ...string) (out []zygoteKey) {
	for _, d := range digests {
		out = append(out, zygoteKey{digest: d})
	}
	return out
}

func TestEvict(t *testing.T) {
	k := func(s string) zygoteKey { return zygoteKey{digest: s} }
	all := []cached{
		{k("old key"), 400, false, true}, {k("busy"), 400, true, false}, {k("older"), 100, false, false}, {k("newer"), 300, false, false},
	}
	for name, tc := range map[string]struct {
		bounds  []bound
		pressed bool
		want    []string
		still   bool
	}{
		"below the threshold":             {[]bound{{"a", 1000, 850}}, false, nil, false},
		"a byte above it":                 {[]bound{{"a", 1000, 851}}, false, []string{"older"}, false},
		"down to the calm":                {[]bound{{"a", 1000, 901}}, false, []string{"older", "newer"}, false},
		"key stages last":                 {[]bound{{"a", 1000, 1201}}, false, []string{"older", "newer", "old key"}, false},
		"what is busy stays":              {[]bound{{"a", 1000, 2000}}, false, []string{"older", "newer", "old key"}, true},
		"the tightest bound counts":       {[]bound{{"a", 9000, 851}, {"b", 1000, 851}, {"c", 2000, 1}}, false, []string{"older"}, false},
		"each bound comes to its calm":    {[]bound{{"a", 1000, 851}, {"b", 1000, 840}}, false, []string{"older"}, false},
		"once begun it ends at the calm":  {[]bound{{"a", 1000, 801}}, true, []string{"older"}, false},
		"and not below":                   {[]bound{{"a", 1000, 800}}, true, nil, false},
		"without bounds there is no end":  {nil, true, nil, false},
		"a bound of nothing takes it all": {[]bound{{"a", 0, 1}}, false, []string{"older"}, false},
	} {
		out, still := evict(all, memory{bounds: tc.bounds, pressed: tc.pressed})
		if !slices.Equal(out, keysOf(tc.want...)) || still != tc.still {
			t.Errorf("%s: evicted %v, pressed %v, want %v, %v", name, out, still, tc.want, tc.still)
		}
	}
}

func TestFit(t *testing.T) {
	k := func(s string) zygoteKey { return zygoteKey{digest: s} }
	all := []cached{{k("key"), 30, false, true}, {k("busy"), 40, true, false}, {k("idle"), 20, false, false}}
	for name, tc := range map[string]struct {
		m       memory
		bytes   int64
		want    []string
		missing int64
	}{
		"it fits":                     {plain(850, 90), 760, nil, 0},
		"an idle one gives way":       {plain(850, 90), 761, []string{"idle"}, 0},
		"then a key stage's":          {plain(850, 90), 781, []string{"idle", "key"}, 0},
		"if that is not enough, none": {plain(850, 90), 811, nil, 1},
		"loads under way count":       {memory{bounds: plain(850, 90).bounds, coming: 760}, 1, []string{"idle"}, 0},
		"when others have taken all":  {plain(850, 1000), 10, nil, 110},
	} {
		out, missing := fit(all, tc.m, tc.bytes)
		if !slices.Equal(out, keysOf(tc.want...)) || missing != tc.missing {
			t.Errorf("%s: %v, missing %d, want %v, %d", name, out, missing, tc.want, tc.missing)
		}
	}
}

func TestRoom(t *testing.T) {
	all := []cached{{bytes: 10}, {bytes: 20, busy: true}, {bytes: 30, keep: true}}
	for name, tc := range map[string]struct {
		m     memory
		bytes int64
		keep  bool
		want  bool
	}{
		"free memory":                  {plain(850, 60), 790, false, true},
		"one byte short":               {plain(850, 60), 791, false, false},
		"a key stage takes idle ones'": {plain(850, 60), 800, true, true},
		"but no busy or key one's":     {plain(850, 60), 801, true, false},
		"of unknown size, and room":    {plain(850, 850), 0, false, true},
		"of unknown size, and no room": {plain(850, 851), 0, false, false},
		"memory is short":              {memory{bounds: plain(850, 0).bounds, pressed: true}, 1, true, false},
		"it was short a moment ago":    {memory{bounds: plain(850, 0).bounds, short: true}, 1, true, false},
	} {
		if got := room(all, tc.m, tc.bytes, tc.keep); got != tc.want {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
}

// TestEvictChurn plays many variants that come, get busy, idle and key stages, against what may never happen.
func TestEvictChurn(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var all []cached
		pressed := false
		for step := range 60 {
			for i := range all {
				if rng.IntN(3) == 0 {
					all[i].busy, all[i].keep = rng.IntN(2) == 0, rng.IntN(4) == 0
				}
			}
			m := memory{pressed: pressed, bounds: []bound{{"a", 1000, sizeOf(all)}, {"b", 2000, sizeOf(all) + rng.Int64N(1500)}}}
			bytes := 1 + rng.Int64N(400)
			before := slices.Clone(all)
			where := fmt.Sprintf("seed %d, step %d", seed, step)
			out, missing := fit(all, m, bytes)
			checkVictims(t, where, all, out, max(0, bytes-m.free()), missing == 0)
			if missing == 0 {
				all = without(all, out)
				all = append(all, cached{key: zygoteKey{digest: fmt.Sprint(step)}, bytes: bytes})
			}
			m.bounds[0].used = sizeOf(all)
			var victims []zygoteKey
			again, _ := evict(all, m)
			victims, pressed = evict(all, m)
			if !slices.Equal(again, victims) {
				t.Fatalf("%s: %v and then %v", where, again, victims)
			}
			if _, room := m.tightest(Threshold); room >= 0 && !m.pressed && len(victims) > 0 {
				t.Fatalf("%s: %v evicted below the threshold", where, victims)
			}
			_, calm := m.tightest(calmBelow)
			checkVictims(t, where, all, victims, -calm, !pressed)
			all = without(all, victims)
			if len(before) > 0 && before[0].bytes == 0 {
				t.Fatal("the list was changed")
			}
		}
	}
}

func sizeOf(all []cached) (sum int64) {
	for _, c := range all {
		sum += c.bytes
	}
	return sum
}

func without(all []cached, gone []zygoteKey) []cached {
	return slices.DeleteFunc(slices.Clone(all), func(c cached) bool { return slices.Contains(gone, c.key) })
}

// checkVictims: none is busy; without the last they do not suffice; each is the first idle one of its rank, key stages after all others; if
// they suffice, so it is said.
func checkVictims(t *testing.T, where string, all []cached, out []zygoteKey, bytes int64, enough bool) {
	t.Helper()
	idle := slices.DeleteFunc(slices.Clone(all), func(c cached) bool { return c.busy })
	slices.SortStableFunc(idle, func(a, b cached) int {
		switch {
		case a.keep == b.keep:
			return 0
		case a.keep:
			return 1
		}
		return -1
	})
	sum := int64(0)
	for i, k := range out {
		if i >= len(idle) || idle[i].key != k {
			t.Fatalf("%s: victim %d is %v, want them in the order of %v", where, i, k, idle)
		}
		if sum >= bytes {
			t.Fatalf("%s: %v for %d bytes, want no more than it takes", where, out, bytes)
		}
		sum += idle[i].bytes
	}
	if len(out) > 0 && enough != (sum >= bytes) {
		t.Fatalf("%s: %d bytes for %d, said to be enough: %v", where, sum, bytes, enough)
	}
}

func TestRefusalSaysWhatIsWhere(t *testing.T) {
	const gb = 1 << 30
	n := need{5<<30 + gb*2/5, "model file 5.2 GiB"}
	own := memory{bounds: []bound{{boundMachine, 64 * gb, 20 * gb}, {boundOwn, 24 * gb, 173 * gb / 10}}, coming: gb}
	for name, tc := range map[string]struct {
		m    memory
		own  int64
		want []string
	}{
		"our own share": {own, 173 * gb / 10, []string{
			`zygote of "f.ns" needs about 5.4 GiB (model file 5.2 GiB)`, "2.1 GiB are free of 20.4 GiB (85 % of 24 GiB, --memory)",
			"12 GiB are held by zygotes with replicas: g.ns 8 GiB, h.ns 4 GiB", "1 GiB are kept for loads under way: x.ns 1 GiB", "raise --memory",
		}},
		"others' memory": {memory{bounds: []bound{{boundMachine, 24 * gb, 20 * gb}}}, 12 * gb, []string{
			"(85 % of 24 GiB, machine)", "8 GiB are used by other processes", "use a node with more memory",
		}},
		"never": {memory{bounds: []bound{{boundCgroup, 4 * gb, 0}}}, 0, []string{"3.4 GiB are free of 3.4 GiB (85 % of 4 GiB, cgroup)", "it can never fit here"}},
	} {
		err := refusal("f.ns", n, tc.m, tc.own, []keeper{{"h.ns", 4 * gb}, {"g.ns", 8 * gb}}, []keeper{{"x.ns", gb}})
		for _, want := range tc.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q in it", name, err, want)
			}
		}
	}
}

const statm = "2000 500 200 10 0 300 0\n"

// TestKernelReads reads trees of version 1 and 2 as they are in containers and out of them.
func TestKernelReads(t *testing.T) {
	const mounts1 = "33 32 0:30 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n34 32 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
	const mounts2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
	const info = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    400 kB\n"
	const none = "9223372036854771712\n"
	machine := bound{boundMachine, 1000 << 10, 600 << 10}
	for name, tc := range map[string]struct {
		files map[string]string
		want  []bound
	}{
		"no cgroup": {map[string]string{"proc/meminfo": info}, []bound{machine}},
		"version 1, the inner one bounds": {map[string]string{
			"proc/meminfo": info, "proc/self/cgroup": "4:cpu:/\n3:memory:/a/b\n0::/\n", "proc/self/mountinfo": mounts1,
			"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "500000\n", "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": "300000\n",
			"sys/fs/cgroup/memory/a/b/memory.stat":         "cache 5\nactive_file 1\ntotal_active_file 50000\ntotal_inactive_file 30000\n",
			"sys/fs/cgroup/memory/a/memory.limit_in_bytes": none, "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "900000\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": none,
		}, []bound{machine, {boundCgroup, 500000, 220000}}},
		"version 2, the outer one leaves less": {map[string]string{
			"proc/meminfo": info, "proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": mounts2,
			"sys/fs/cgroup/a/b/memory.max": "500000\n", "sys/fs/cgroup/a/b/memory.current": "300000\n", "sys/fs/cgroup/a/b/memory.stat": "anon 1\n",
			"sys/fs/cgroup/a/memory.max": "600000\n", "sys/fs/cgroup/a/memory.current": "599000\n",
			"sys/fs/cgroup/a/memory.stat": "active_file 1000\ninactive_file 3000\n", "sys/fs/cgroup/memory.stat": "anon 1\n",
		}, []bound{machine, {boundCgroup, 600000, 595000}}},
		"version 1 in a container, which sees its own alone": {map[string]string{
			"proc/self/cgroup": "3:memory:/docker/x\n", "proc/self/mountinfo": "33 32 0:30 /docker/x /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "7000\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
		}, []bound{{boundCgroup, 7000, 5000}}},
		"version 2 in a namespace": {map[string]string{
			"proc/self/cgroup": "0::/../other\n", "proc/self/mountinfo": "30 23 0:26 /../x /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
			"sys/fs/cgroup/memory.max": "7000\n", "sys/fs/cgroup/memory.current": "5000\n",
		}, []bound{{boundCgroup, 7000, 5000}}},
		"nothing is readable": {map[string]string{"proc/self/cgroup": "x\n0::\n:::\n", "proc/self/mountinfo": "x\n - cgroup2\n"}, nil},
	} {
		root := t.TempDir()
		for file, text := range tc.files {
			path := root + "/" + file
			if err := os.MkdirAll(path[:strings.LastIndexByte(path, '/')], 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if got := newKernel(root).bounds(); !slices.Equal(got, tc.want) {
			t.Errorf("%s: %v, want %v", name, got, tc.want)
		}
	}
	root := t.TempDir()
	if err := os.MkdirAll(root+"/proc/7", 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(root+"/proc/7/statm", []byte(statm), 0o600); err != nil {
		t.Fatal(err)
	}
	k := newKernel(root)
	if own, files := k.resident(7); own != 300*k.page || files != 200*k.page {
		t.Errorf("%d of its own and %d of files, want %d and %d", own, files, 300*k.page, 200*k.page)
	}
	if own, files := k.resident(8); own != 0 || files != 0 {
		t.Errorf("of a process that has ended: %d, %d", own, files)
	}
}

// TestKernelIsThisOne reads the machine that the test runs on.
func TestKernelIsThisOne(t *testing.T) {
	k := newKernel("")
	b := k.bounds()
	if len(b) == 0 || b[0].name != boundMachine || b[0].total < 64<<20 || b[0].used <= 0 || b[0].used > b[0].total {
		t.Errorf("bounds %+v, want the machine's memory first", b)
	}
	own, files := k.resident(os.Getpid())
	exact, err := k.exact(os.Getpid())
	if err != nil || own < 1<<20 || files < 1<<20 || exact < own/2 {
		t.Errorf("this process: %d of its own, %d of files, %d in all, %v", own, files, exact, err)
	}
}

// FuzzGroupFolders: whatever /proc says, what is looked at lies under a mount that it names.
func FuzzGroupFolders(f *testing.F) {
	f.Add("3:memory:/a/b\n0::/x\n", "33 32 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n")
	f.Add("0::/../x\n", "30 23 0:26 /a /sys rw - cgroup2 c rw")
	f.Fuzz(func(t *testing.T, cgroup, mounts string) {
		for _, dir := range groupFolders(cgroup, mounts) {
			if strings.Contains("/"+dir+"/", "/../") && !strings.Contains(mounts, "..") {
				t.Errorf("%q", dir)
			}
		}
	})
}
