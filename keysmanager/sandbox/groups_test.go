package sandbox

import (
	"path/filepath"
	"strings"
	"testing"
)

func TestHomeInFindsTheGroupsFolder(t *testing.T) {
	const mounts = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n" +
		"32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:3 - cgroup cgroup rw,cpu,cpuacct\n" +
		"35 31 0:32 /docker/ab /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" +
		"36 31 0:33 / /cut short\n" +
		"40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,xattr,name=systemd\n"
	const own = "9:name=systemd:/init.scope\n4:memory:/docker/ab/c\n2:cpu,cpuacct:/x\nnonsense\n0::/\n"
	for name, tc := range map[string]struct{ device, own, want string }{
		"two controllers":      {"0:29", own, "/sys/fs/cgroup/cpu,cpuacct/x"},
		"a part is mounted":    {"0:32", own, "/sys/fs/cgroup/memory/c"},
		"a name":               {"0:37", own, "/sys/fs/cgroup/systemd/init.scope"},
		"another part":         {"0:32", "4:memory:/docker/cd\n", ""},
		"no such mount":        {"0:99", own, ""},
		"a line that is short": {"0:33", own, ""},
		"in no group":          {"0:29", "0::/\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := homeIn(tc.device, tc.own, mounts)
			if got != tc.want || (err == nil) != (tc.want != "") {
				t.Errorf("%q, %v, want %q", got, err, tc.want)
			}
		})
	}
}

// FuzzHomeIn checks that homeIn does not panic and returns no folder outside of the mount.
func FuzzHomeIn(f *testing.F) {
	f.Add("0:29", "2:cpu,cpuacct:/x\n", "32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n")
	f.Add("0:29", "2:cpu:/../x\n", "32 31 0:29 / /m rw - cgroup cgroup cpu\n")
	f.Add("", "::\n", "- - - - - - - - - -\n")
	f.Fuzz(func(t *testing.T, device, own, mounts string) {
		dir, err := homeIn(device, own, mounts)
		if err == nil && strings.Contains("/"+filepath.ToSlash(dir)+"/", "/../") && !strings.Contains(mounts, "..") {
			t.Errorf("%q, want a folder in a mount", dir)
		}
	})
}
