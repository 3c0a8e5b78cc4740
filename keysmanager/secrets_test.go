package keysmanager

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// secretStore is a folder for secrets as package secret makes it, below sandbox.RunFolder.
func secretStore(t *testing.T) string {
	t.Helper()
	if err := os.MkdirAll(sandbox.RunFolder, 0o711); err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(sandbox.RunFolder, "secrets-test-") //nolint:usetesting // not in /tmp
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// give returns a spec of another function that names a set of secrets, of which key has this value.
func give(t *testing.T, s node.Spec, function, store string, gid int, set, value string) node.Spec {
	t.Helper()
	s.Function, s.Group, s.Secrets = function+".ns", gid, filepath.Join(store, "ns", function, set)
	key := filepath.Join(s.Secrets, "key")
	if err := errors.Join(
		os.MkdirAll(s.Secrets, 0o700), os.Chown(s.Secrets, 0, gid),
		os.Chmod(s.Secrets, 0o750), //nolint:gosec // for its group
		os.WriteFile(key, []byte(value), 0o400), os.Chown(key, 0, gid),
		os.Chmod(key, 0o440), //nolint:gosec // for its group
	); err != nil {
		t.Fatal(err)
	}
	return s
}

// finds lists what a process finds below sandbox.RunFolder: files and their content. It leaves out
// the part of each path before the namespace.
func finds(t *testing.T, pid int, store string) string {
	t.Helper()
	root := fmt.Sprintf("/proc/%d/root", pid)
	if _, err := os.Stat(root + sandbox.RunFolder); err != nil {
		t.Fatal(err)
	}
	var out []string
	err := filepath.Walk(root+sandbox.RunFolder, func(path string, info os.FileInfo, err error) error {
		if err != nil || info.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		out = append(out, strings.TrimPrefix(path, root+store+"/ns/")+"="+string(b))
		return err
	})
	if err != nil {
		t.Error(err)
	}
	return strings.Join(out, " ")
}

// TestSecretsDivideZygotes checks that functions of one image share a zygote if they have no
// secrets, and that each function with secrets has a separate zygote. A function with secrets must
// find its own secrets on each start path, and also under a later daemon.
func TestSecretsDivideZygotes(t *testing.T) {
	dir, store, w := openDir(t), secretStore(t), wardenOf(t)
	first := accountsIn(t, dir)
	gid, err := first.Group("ns with set")
	if err != nil {
		t.Fatal(err)
	}
	n := newNode(t, func(c *Config) { c.Accounts, c.Warden = first, w })
	plain, alike := withModel, withModel
	alike.Function = "alike.ns"
	keyed, same := give(t, withModel, "keyed", store, gid, "set", "1"), give(t, withModel, "same", store, gid, "set", "2")
	mapped, cold, script := give(t, withModel, "mapped", store, gid, "set", "3"), give(t, withModel, "cold", store, gid, "set", "4"), give(t, withModel, "script", store, gid, "set", "5")
	mapped.Start, cold.Start, script.Env = "map", "cold", nil
	pids := map[string]int{}
	for _, s := range []node.Spec{plain, alike, keyed, same, mapped, cold, script} {
		r := n.start("of-"+s.Function, s)
		n.answers(r)
		name := strings.TrimSuffix(s.Function, ".ns")
		want := ""
		if s.Secrets != "" {
			want = fmt.Sprintf("%s/set/key=%d", name, slices.Index([]string{"", "keyed", "same", "mapped", "cold", "script"}, name))
		}
		if got := finds(t, r.PID, store); got != want {
			t.Errorf("%s on path %s finds %q, want %q", s.Function, r.Path, got, want)
		}
		pids[s.Function] = r.PID
	}
	zygotes := map[string]int{}
	for _, z := range n.Inventory().Zygotes {
		if z.PID == 0 {
			continue // memory
		}
		zygotes[z.Function] = z.PID
		if got, want := finds(t, z.PID, store), finds(t, pids[z.Function], store); got != want {
			t.Errorf("zygote of %s finds %q, want %q", z.Function, got, want)
		}
	}
	if len(zygotes) != 3 || zygotes["alike.ns"] == 0 || zygotes["keyed.ns"] == 0 || zygotes["same.ns"] == 0 {
		t.Errorf("zygotes %v, want one of the functions without secrets and one of each that forks and has some", zygotes)
	}
	n.Detach()
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	n = newNode(t, func(c *Config) { c.Accounts, c.Warden = accountsIn(t, dir), w })
	// The folder is created again, as it is when `up` starts again. A zygote may still have the old
	// folder, but its forks must find the new one.
	if err := os.RemoveAll(keyed.Secrets); err != nil {
		t.Fatal(err)
	}
	keyed = give(t, withModel, "keyed", store, gid, "set", "anew")
	r := n.start("later", keyed)
	if got := finds(t, r.PID, store); got != "keyed/set/key=anew" {
		t.Errorf("later, it finds %q", got)
	}
	moved := give(t, withModel, "keyed", store, gid, "other", "of a later deploy")
	if got := finds(t, n.start("moved", moved).PID, store); got != "keyed/other/key=of a later deploy" {
		t.Errorf("with another set, it finds %q", got)
	}
	if got := finds(t, r.PID, store); got != "keyed/set/key=anew" {
		t.Errorf("the earlier replica finds %q", got)
	}
	later := map[string]bool{}
	for _, z := range n.Inventory().Zygotes {
		later[fmt.Sprint(z.Function, " ", z.PID)] = true
	}
	if !later[fmt.Sprint("keyed.ns ", zygotes["keyed.ns"])] || len(later) != 5 {
		t.Errorf("zygotes %v, want those of before (%v) and another one", later, zygotes)
	}
	n.Close()
}

// TestDescriptionsOfAnEarlierRelease reads the description of a zygote as an earlier release wrote
// it. That zygote is in the machine's network and has no secrets.
func TestDescriptionsOfAnEarlierRelease(t *testing.T) {
	d := zygote.Description{Namespace: "ns", Digest: "d", Network: resources.NetworkDefault, Secrets: "/s", Function: "f.ns"}
	key, now := zygote.Key{Namespace: "ns", Digest: "d", Network: resources.NetworkDefault, Secrets: "/s"}, encode(meta{Zygote: &d})
	m, err := decode(now)
	if err != nil || m.Zygote.Key() != key {
		t.Fatalf("%+v, %v, want key %+v", m.Zygote, err, key)
	}
	var fields map[string]any
	if err := json.Unmarshal(now, &fields); err != nil {
		t.Fatal(err)
	}
	delete(fields["zygote"].(map[string]any), "secrets")
	delete(fields["zygote"].(map[string]any), "network")
	b, err := json.Marshal(fields)
	if err != nil {
		t.Fatal(err)
	}
	if m, err = decode(b); err != nil || m.Zygote.Key() != (zygote.Key{Namespace: "ns", Digest: "d", Network: resources.NetworkHost}) {
		t.Errorf("%+v, %v, want one in the machine's network without secrets", m.Zygote, err)
	}
}

// TestSecretsInAWorker checks that each function that names the same secrets finds its folder, and
// that a deploy with other secrets uses another worker.
func TestSecretsInAWorker(t *testing.T) {
	python, dir, store := proctest.Python(t), openDir(t), secretStore(t)
	accounts := accountsIn(t, dir)
	gid, err := accounts.Group("ns with set")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil { //nolint:gosec // images
		t.Fatal(err)
	}
	n := pyNode(t, filepath.Join(dir, "images"), map[string]string{"left": pyLeft, "right": pyRight}, func(c *Config) { c.Accounts = accounts })
	left, right := give(t, sharing(python, "left"), "left", store, gid, "set", "1"), give(t, sharing(python, "right"), "right", store, gid, "set", "2")
	a := n.start("a", left)
	if got := finds(t, a.PID, store); got != "left/set/key=1" {
		t.Errorf("it finds %q", got)
	}
	b := n.start("b", right)
	if got := finds(t, b.PID, store); got != "left/set/key=1 right/set/key=2" || a.PID != b.PID {
		t.Errorf("processes %d and %d find %q, want one with both", a.PID, b.PID, got)
	}
	for what, s := range map[string]node.Spec{
		"another set": give(t, sharing(python, "left"), "left", store, gid, "other", "3"), "no secrets": sharing(python, "right"),
	} {
		r := n.start(what, s)
		if got := finds(t, r.PID, store); r.PID == a.PID || strings.Contains(got, "/set/") {
			t.Errorf("with %s: process %d finds %q, want another one than %d", what, r.PID, got, a.PID)
		}
	}
	for _, name := range []string{"a", "b"} {
		if err := n.Stop(t.Context(), name, time.Minute); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFunctionsCannotNameASecretsFolder checks that a function's environment cannot set the secrets
// folder of its watchdog, which may be root.
func TestFunctionsCannotNameASecretsFolder(t *testing.T) {
	m := &starter{cfg: &Config{Watchdog: []string{"stagecoach", "watchdog"}}}
	s := node.Spec{Process: "cat", Env: map[string]string{"STAGECOACH_SECRETS": "/root", "secret_mount_path": "/root"}}
	for folder, want := range map[string]string{"": "", "/run/stagecoach/secrets-x/ns/f/set": "/run/stagecoach/secrets-x/ns/f/set"} {
		s.Secrets = folder
		c := sandbox.Command{Env: environmentOf(s)}
		if err := m.shim(&c, s, sandbox.Image{Name: "x"}); err != nil {
			t.Fatal(err)
		}
		if got := c.Env["STAGECOACH_SECRETS"]; got != want || c.Env["STAGECOACH_ENV_STAGECOACH_SECRETS"] != "" {
			t.Errorf("told %q, want %q: %v", got, want, c.Env)
		}
	}
}
