package cli

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// emptyMachine is a machine with these files and nothing else.
func emptyMachine(t *testing.T, files map[string]string) machine {
	m := machine{root: t.TempDir()}
	for name, text := range files {
		path := filepath.Join(m.root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// find returns the diagnosis of a check as text.
func find(all []diagnosis, check string) string {
	i := slices.IndexFunc(all, func(d diagnosis) bool { return d.Check == check })
	if i < 0 {
		return "no such check"
	}
	return all[i].State + ": " + all[i].Found + "; " + all[i].ToDo
}

// TestDoctorLooksAtAMachine looks at machines that lack one thing each.
func TestDoctorLooksAtAMachine(t *testing.T) {
	const meminfo = "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\n"
	for name, tc := range map[string]struct {
		files       map[string]string
		user        int
		check, want string
	}{
		"no root":          {nil, 1000, "user", "warning: uid 1000, not root; run the daemon as root. Without it"},
		"root":             {nil, 0, "user", "ok: root"},
		"a user in range":  {map[string]string{"etc/passwd": "root:x:0:0\neve:x:200007:5\n"}, 0, "user numbers", "warning: eve of /etc/passwd has the number 200007, which is in 200000-265535; choose other numbers with --uids"},
		"a group in range": {map[string]string{"etc/group": "eves:x:200008:\n"}, 0, "user numbers", "warning: eves of /etc/group has the number 200008"},
		"no such users":    {map[string]string{"etc/passwd": "root:x:0:0\nbroken\n"}, 0, "user numbers", "ok: 200000-265535, no other user"},
		"no cgroups":       {nil, 0, "cgroups", "warning: "},
		"no controllers":   {map[string]string{"proc/self/mountinfo": "30 23 0:26 / /none rw - cgroup2 cgroup2 rw\n", "proc/self/cgroup": "0::/\n"}, 0, "cgroups", "warning: "},
		"no veth":          {map[string]string{"lib/modules/" + kernelRelease(t) + "/modules.builtin": "kernel/net/other.ko\n"}, 0, "veth", "warning: the kernel has no veth; use a kernel with it"},
		"veth":             {map[string]string{"lib/modules/" + kernelRelease(t) + "/modules.dep": "kernel/drivers/net/veth.ko.xz:\n"}, 0, "veth", "ok: the kernel has veth"},
		"nftables loaded":  {map[string]string{"sys/module/nf_tables/refcnt": "1"}, 0, "nftables", "ok: the kernel has nf_tables"},
		"no module list":   {nil, 0, "nftables", "warning: unknown: there is no list of this kernel's modules; try `modprobe nf_tables`"},
		"no meminfo":       {nil, 0, "memory", "missing: unknown: no /proc/meminfo"},
		"memory":           {map[string]string{"proc/meminfo": meminfo}, 0, "memory", "ok: 11.4 GiB of 15.3 GiB free (machine)"},
		"little memory":    {map[string]string{"proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 500000 kB\n"}, 0, "memory", "warning: 488.3 MiB of 15.3 GiB free (machine); end other programs"},
		"no memory":        {map[string]string{"proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 5000 kB\n"}, 0, "memory", "missing: 4.9 MiB of"},
		"no driver":        {nil, 0, "accelerators", "ok: no driver of NVIDIA"},
		"driver, no NVML":  {map[string]string{"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX  550.1\nGCC\n"}, 0, "accelerators", "missing: NVIDIA UNIX 550.1, but NVML shows no device; install libnvidia-ml.so.1"},
	} {
		t.Run(name, func(t *testing.T) {
			m := emptyMachine(t, tc.files)
			m.user = tc.user
			if got := find(m.all(sandbox.DefaultRange.String(), t.TempDir()), tc.check); !strings.HasPrefix(got, tc.want) {
				t.Errorf("%s: %q, want %q", tc.check, got, tc.want)
			}
		})
	}
	if got := find([]diagnosis{emptyMachine(t, nil).disk("/proc/none")}, "disk"); !strings.HasPrefix(got, "missing: ") {
		t.Errorf("disk: %q", got)
	}
	if got := find([]diagnosis{emptyMachine(t, nil).numbers("7")}, "user numbers"); !strings.HasPrefix(got, `missing: "7", want FIRST-LAST`) {
		t.Errorf("uids: %q", got)
	}
}

func kernelRelease(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

func TestDoctorJudgesClocks(t *testing.T) {
	for _, tc := range []struct {
		ahead, margin time.Duration
		want          string
	}{
		{300 * time.Millisecond, time.Millisecond, "ok: 300ms from the control plane's, give or take 1ms"},
		{-3 * time.Second, time.Millisecond, "warning: -3s from"},
		{3 * time.Second, 4 * time.Second, "ok: 3s"},
		{-2 * time.Minute, time.Second, "missing: -2m0s from the control plane's, give or take 1s; keep both machines' clocks right"},
	} {
		if got := find([]diagnosis{skew(tc.ahead, tc.margin)}, "clock"); !strings.HasPrefix(got, tc.want) {
			t.Errorf("%v, margin %v: %q, want %q", tc.ahead, tc.margin, got, tc.want)
		}
	}
	if got := find([]diagnosis{clock(time.Unix(0, 0))}, "clock"); !strings.HasPrefix(got, "missing: 1970-01-01T00:00:00Z, which cannot be true") {
		t.Errorf("clock: %q", got)
	}
}

func TestDoctorComparesReleases(t *testing.T) {
	if got := find([]diagnosis{release("v1", "v2")}, "control plane"); !strings.HasPrefix(got, "warning: version v1, this program is v2; run the same release") {
		t.Errorf("releases: %q", got)
	}
	if err := (Doctor{}).Run(t.Context(), []string{"--join", "nats://127.0.0.1:1"}, &strings.Builder{}); err == nil || !strings.Contains(err.Error(), "want --node") {
		t.Errorf("--join alone: %v", err)
	}
}
