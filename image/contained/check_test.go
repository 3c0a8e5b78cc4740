package contained

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
)

// checks returns the findings by their names.
func checks(t *testing.T, c Config) map[string]Finding {
	t.Helper()
	out := map[string]Finding{}
	for _, f := range Check(t.Context(), c) {
		out[f.Check] = f
	}
	return out
}

func TestCheckOfAContainerdThatWorks(t *testing.T) {
	server := containerdtest.Start(t)
	all := checks(t, Config{Address: server.Address, Namespace: namespace, Snapshotter: DefaultSnapshotter})
	for _, name := range []string{"user", "socket", "version", "snapshotter", "containerd-shim-runc-v2", "runc", "cgroups"} {
		if f, ok := all[name]; !ok || !f.OK {
			t.Errorf("%s: %+v, want it to be OK", name, f)
		}
	}
	if f := checks(t, Config{Address: server.Address, Namespace: namespace, Snapshotter: "odd"})["snapshotter"]; f.OK || !strings.Contains(f.ToDo, "overlayfs") {
		t.Errorf("snapshotter odd: %+v, want what there is", f)
	}
	server.Kill()
	if f := checks(t, Config{Address: server.Address})["socket"]; f.OK || !strings.Contains(f.Found, "nobody listens") {
		t.Errorf("after its end: %+v", f)
	}
	if f := checks(t, Config{Address: filepath.Join(t.TempDir(), "none.sock")})["socket"]; f.OK || !strings.Contains(f.ToDo, "--containerd-address") {
		t.Errorf("no socket: %+v", f)
	}
}

func TestCheckOfVersionsAndGroups(t *testing.T) {
	for version, want := range map[string]bool{"1.6.20~ds1": true, "v2.4.2": true, "1.5.9": false, "v1.10.0": true, "0.9": false, "2-main": true} {
		if got := newEnough(version); got != want {
			t.Errorf("version %s: %t, want %t", version, got, want)
		}
	}
	v2 := t.TempDir()
	for controllers, want := range map[string]bool{"cpuset cpu io memory pids\n": true, "cpu pids\n": false} {
		if err := os.WriteFile(filepath.Join(v2, "cgroup.controllers"), []byte(controllers), 0o600); err != nil {
			t.Fatal(err)
		}
		if f := checkGroups(v2); f.OK != want || !strings.HasPrefix(f.Found, "v2") {
			t.Errorf("controllers %q: %+v, want %t", controllers, f, want)
		}
	}
	if f := checkGroups(t.TempDir()); f.OK || !strings.HasPrefix(f.Found, "none") {
		t.Errorf("no cgroups: %+v", f)
	}
	if f := checkPrograms(os.Getpid()); len(f) != 2 {
		t.Errorf("programs: %+v", f)
	}
}
