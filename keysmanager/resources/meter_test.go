package resources

import (
	"os"
	"slices"
	"strings"
	"testing"
)

const statm = "2000 500 200 10 0 300 0\n"

// TestKernelFindsTheTightestCgroup reads file trees of cgroups of versions 1 and 2, as they look
// inside and outside of containers.
func TestKernelFindsTheTightestCgroup(t *testing.T) {
	const mounts1 = "33 32 0:30 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n34 32 0:31 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
	const mounts2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
	const info = "MemTotal:       1000 kB\nMemFree:  1 kB\nMemAvailable:    400 kB\n"
	const none = "9223372036854771712\n"
	machine := Bound{Name: BoundMachine, Total: 1000 << 10, Used: 600 << 10}
	for name, tc := range map[string]struct {
		files map[string]string
		want  []Bound
	}{
		"no cgroup": {map[string]string{"proc/meminfo": info}, []Bound{machine}},
		"version 1, the inner one bounds": {map[string]string{
			"proc/meminfo": info, "proc/self/cgroup": "4:cpu:/\n3:memory:/a/b\n0::/\n", "proc/self/mountinfo": mounts1,
			"sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "500000\n", "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes": "300000\n",
			"sys/fs/cgroup/memory/a/b/memory.stat":         "cache 5\nactive_file 1\ntotal_active_file 50000\ntotal_inactive_file 30000\n",
			"sys/fs/cgroup/memory/a/memory.limit_in_bytes": none, "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "900000\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": none,
		}, []Bound{machine, {Name: BoundCgroup, Total: 500000, Used: 220000}}},
		"version 2, the outer one leaves less": {map[string]string{
			"proc/meminfo": info, "proc/self/cgroup": "0::/a/b\n", "proc/self/mountinfo": mounts2,
			"sys/fs/cgroup/a/b/memory.max": "500000\n", "sys/fs/cgroup/a/b/memory.current": "300000\n", "sys/fs/cgroup/a/b/memory.stat": "anon 1\n",
			"sys/fs/cgroup/a/memory.max": "600000\n", "sys/fs/cgroup/a/memory.current": "599000\n",
			"sys/fs/cgroup/a/memory.stat": "active_file 1000\ninactive_file 3000\n", "sys/fs/cgroup/memory.stat": "anon 1\n",
		}, []Bound{machine, {Name: BoundCgroup, Total: 600000, Used: 595000}}},
		"version 1 in a container, which sees its own alone": {map[string]string{
			"proc/self/cgroup": "3:memory:/docker/x\n", "proc/self/mountinfo": "33 32 0:30 /docker/x /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "7000\n", "sys/fs/cgroup/memory/memory.usage_in_bytes": "5000\n",
		}, []Bound{{Name: BoundCgroup, Total: 7000, Used: 5000}}},
		"version 2 in a namespace": {map[string]string{
			"proc/self/cgroup": "0::/../other\n", "proc/self/mountinfo": "30 23 0:26 /../x /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
			"sys/fs/cgroup/memory.max": "7000\n", "sys/fs/cgroup/memory.current": "5000\n",
		}, []Bound{{Name: BoundCgroup, Total: 7000, Used: 5000}}},
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
		if got := NewKernel(root).Bounds(); !slices.Equal(got, tc.want) {
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
	k := NewKernel(root)
	if own, files := k.Resident(7); own != 300*k.page || files != 200*k.page {
		t.Errorf("%d of its own and %d of files, want %d and %d", own, files, 300*k.page, 200*k.page)
	}
	if own, files := k.Resident(8); own != 0 || files != 0 {
		t.Errorf("of a process that has ended: %d, %d", own, files)
	}
}

// TestKernelMeasuresThisMachine reads the machine that the test runs on.
func TestKernelMeasuresThisMachine(t *testing.T) {
	k := NewKernel("")
	b := k.Bounds()
	if len(b) == 0 || b[0].Name != BoundMachine || b[0].Total < 64<<20 || b[0].Used <= 0 || b[0].Used > b[0].Total {
		t.Errorf("bounds %+v, want the machine's memory first", b)
	}
	own, files := k.Resident(os.Getpid())
	exact, err := k.Exact(os.Getpid())
	if err != nil || own < 1<<20 || files < 1<<20 || exact < own/2 {
		t.Errorf("this process: %d of its own, %d of files, %d in all, %v", own, files, exact, err)
	}
}

// FuzzGroupFolders checks that, whatever /proc says, only folders below a mount that /proc names
// are read.
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
