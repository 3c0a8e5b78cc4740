package container

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// actAs makes this program a process that starts containers and waits to be killed.
const actAs = "act-as-a-runtime"

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == actAs {
		if err := act(os.Args[2]); err != nil {
			fmt.Println(err)
		}
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func act(text string) error {
	cfg := Config{Log: slog.New(slog.DiscardHandler)}
	if err := json.Unmarshal([]byte(text), &cfg); err != nil {
		return err
	}
	r, err := openConfig(cfg)
	if err != nil {
		return err
	}
	for _, c := range []sandbox.Command{sleeper(), rooted()} {
		p, err := r.Start(context.Background(), c)
		if err != nil {
			return err
		}
		fmt.Println(p.PID())
	}
	select {}
}

func openConfig(cfg Config) (*Runtime, error) { return Open(context.Background(), cfg) }

// sleeper returns a command with an account whose program runs until it is killed.
func sleeper() sandbox.Command {
	return sandbox.Command{
		Dir: "/usr", Argv: []string{"sleep", "600"}, As: &sandbox.Account{UID: 320_001, GID: 320_001}, Env: map[string]string{"PASSWORD": "of nobody else"},
		Purpose: sandbox.Purpose{Labels: map[string]string{
			sandbox.LabelFunction: "ocr-detect.openfaas-fn", sandbox.LabelImage: "stagecoach/ocr:1", sandbox.LabelReplica: "zygote-X",
		}},
	}
}

// rooted returns such a command with a root of its own.
func rooted() sandbox.Command {
	return sandbox.Command{Chroot: os.Getenv("ROOTED"), Argv: []string{"/usr/bin/sleep", "600"}, Binds: []sandbox.Bind{{From: "/usr", To: "/usr"}}}
}

// rootFor makes a root for rooted.
func rootFor(t *testing.T) {
	t.Helper()
	root := filepath.Join(proctest.Outside(t), "root")
	if err := os.MkdirAll(root, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"bin", "lib", "lib64"} {
		if err := os.Symlink("usr/"+dir, filepath.Join(root, dir)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("ROOTED", root)
}

func config(t *testing.T, s *containerdtest.Server) Config {
	t.Helper()
	return Config{Address: s.Address, Namespace: s.Namespace, Node: s.Namespace, Init: containerdtest.Init(t), Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
}

func open(t *testing.T, s *containerdtest.Server) *Runtime {
	t.Helper()
	r, err := openConfig(config(t, s))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func start(t *testing.T, r *Runtime, c sandbox.Command) *process {
	t.Helper()
	p, err := r.Start(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return p.(*process)
}

// left names everything that containers of a node have left on this machine.
func left(t *testing.T, s *containerdtest.Server) (all []string) {
	t.Helper()
	c := s.Client(s.Namespace)
	containers, err := c.Containers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range containers {
		all = append(all, "container "+c.ID())
	}
	for _, pid := range s.Shims() {
		all = append(all, fmt.Sprintf("shim %d", pid))
	}
	folders, _ := os.ReadDir(Folders) // there are none
	for _, e := range folders {
		if of, err := (&folder{filepath.Join(Folders, e.Name())}).record(); err == nil && of.Node == s.Namespace {
			all = append(all, "folder "+e.Name())
			if b, err := os.ReadFile("/proc/self/mounts"); err == nil && strings.Contains(string(b), Folders+"/"+e.Name()+"/") {
				all = append(all, "mount of "+e.Name())
			}
		}
	}
	return all
}

// groupsOf returns the cgroups of containers of this machine.
func groupsOf(t *testing.T) []string {
	t.Helper()
	all, err := filepath.Glob("/sys/fs/cgroup/*/stagecoach.*")
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// nothingLeft waits until nothing is left of the containers with these ids.
func nothingLeft(t *testing.T, s *containerdtest.Server, ids ...string) {
	t.Helper()
	var have []string
	defer func() {
		if t.Failed() {
			t.Log("left:", have)
		}
	}()
	proctest.Until(t, "nothing is left", func() bool {
		have = left(t, s)
		for _, g := range groupsOf(t) {
			if slices.ContainsFunc(ids, func(id string) bool { return strings.HasSuffix(g, id) }) {
				have = append(have, "cgroup "+g)
			}
		}
		return len(have) == 0
	})
}

// TestContainersSayWhatTheyAreFor checks ids and labels, and that a program's environment is not in
// what containerd stores.
func TestContainersSayWhatTheyAreFor(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	p := start(t, r, sleeper())
	c, err := s.Client(s.Namespace).LoadContainer(t.Context(), p.id)
	if err != nil {
		t.Fatal(err)
	}
	info, err := c.Info(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(info.ID, "ocr-detect-openfaas-fn-") {
		t.Errorf("id %q, want one that begins with the function", info.ID)
	}
	for label, value := range map[string]string{labelFunction: "ocr-detect.openfaas-fn", labelImage: "stagecoach/ocr:1", labelReplica: "zygote-X", labelNode: s.Namespace, labelOwner: r.owner} {
		if info.Labels[label] != value {
			t.Errorf("label %s is %q, want %q", label, info.Labels[label], value)
		}
	}
	if bytes.Contains(info.Spec.GetValue(), []byte("PASSWORD")) {
		t.Errorf("the environment is in the spec: %s", info.Spec.GetValue())
	}
	id := p.id
	r.Close()
	nothingLeft(t, s, id)
}

// TestProgramIsConfined checks what the kernel enforces on a program.
func TestProgramIsConfined(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	defer r.Close()
	p := start(t, r, sleeper())
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID()))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"NoNewPrivs:\t1\n", "Seccomp:\t2\n", "CapBnd:\t0000000000000000\n"} {
		if !strings.Contains(string(b), line) {
			t.Errorf("want %q in its status:\n%s", line, b)
		}
	}
	for _, ns := range []string{"pid", "ipc", "uts", "mnt"} {
		own, err := os.Readlink("/proc/self/ns/" + ns)
		its, err2 := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", p.PID(), ns))
		if err := errors.Join(err, err2); err != nil || own == its {
			t.Errorf("namespace %s: %s, %v, want another one than this process's", ns, its, err)
		}
	}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/root", p.PID()))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if slices.Contains([]string{"root", "home", "run", "work", "srv", "mnt"}, e.Name()) {
			t.Errorf("its root has /%s", e.Name())
		}
	}
	devices, err := os.ReadFile("/sys/fs/cgroup/devices/stagecoach." + p.id + "/devices.list")
	if err == nil && (strings.Contains(string(devices), "a *:*") || !strings.Contains(string(devices), "c 1:3 ")) {
		t.Errorf("devices: %s, want those of /dev alone", devices)
	}
	// Its socket has gone.
	if left, err := os.ReadDir(fmt.Sprintf("/proc/%d/root/dev/stagecoach/run", p.PID())); err != nil || len(left) > 0 {
		t.Errorf("%v, %v, want an empty folder", left, err)
	}
}

// TestNextRuntimeRemovesWhatAKilledOneLeft kills a process with two containers.
func TestNextRuntimeRemovesWhatAKilledOneLeft(t *testing.T) {
	s := containerdtest.Start(t)
	cmd, pids := actor(t, config(t, s))
	r := open(t, s)
	defer r.Close()
	r.Sweep(t.Context())
	if have := left(t, s); len(have) < 7 {
		t.Errorf("%v, want the containers of a process that lives", have)
	}
	kill(t, cmd, pids[:]...)
	r.Sweep(t.Context())
	nothingLeft(t, s)
}

// TestProgramsOutliveContainerd kills containerd under a container. The container runs on, its end
// is noticed, and it is removed once containerd is back.
func TestProgramsOutliveContainerd(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	defer r.Close()
	p, q, other := start(t, r, sleeper()), start(t, r, sleeper()), start(t, r, sleeper())
	s.Kill()
	if err := p.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if status := p.Wait(); status.Signal() != unix.SIGTERM {
		t.Errorf("%#x, want SIGTERM", status)
	}
	p.Forget()
	q.killInit() // then only containerd knows the status
	if _, err := r.Start(t.Context(), sleeper()); err == nil || !strings.Contains(err.Error(), "in a container") {
		t.Errorf("a start without containerd: %v", err)
	}
	s.Run()
	if status := q.Wait(); status.Signal() != unix.SIGKILL {
		t.Errorf("%#x, want SIGKILL", status)
	}
	q.Forget()
	if err := other.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if status := other.Wait(); status.Signal() != unix.SIGKILL {
		t.Errorf("%#x, want SIGKILL", status)
	}
	other.Forget()
	nothingLeft(t, s, p.id, q.id, other.id)
}

// TestKilledShimsAreNoticed kills the shim of a container. containerd then ends the container.
func TestKilledShimsAreNoticed(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	defer r.Close()
	p := start(t, r, sleeper())
	for _, pid := range s.Shims() {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
	}
	if status := p.Wait(); status.Signal() != unix.SIGKILL {
		t.Errorf("%#x, want SIGKILL", status)
	}
	p.Forget()
	nothingLeft(t, s, p.id)
}

// TestManyContainersLeaveNothing starts containers at the same time, ends them in several ways, and
// counts what is left.
func TestManyContainersLeaveNothing(t *testing.T) {
	s := containerdtest.Start(t)
	rootFor(t)
	r := open(t, s)
	var group sync.WaitGroup
	var mu sync.Mutex
	var ids []string
	for i := range 12 {
		group.Go(func() {
			c := sleeper()
			switch i % 3 {
			case 1:
				c = rooted()
			case 2:
				c.Argv = []string{"/no/such/program"}
			}
			p, err := r.Start(t.Context(), c)
			if i%3 == 2 {
				if err == nil {
					t.Error("a program that does not exist starts")
				}
				return
			}
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			ids = append(ids, p.(*process).id)
			mu.Unlock()
			if i%2 == 0 {
				_ = p.Signal(syscall.SIGKILL)
				p.Wait()
				p.Forget()
			}
		})
	}
	group.Wait()
	r.Close()
	nothingLeft(t, s, ids...)
}

// TestOpenSaysWhatIsMissing checks the errors of Open.
func TestOpenSaysWhatIsMissing(t *testing.T) {
	s := containerdtest.Start(t)
	for want, change := range map[string]func(*Config){
		"make build puts it beside stagecoach": func(c *Config) { c.Init = "/no/init" },
		"--containerd-address":                 func(c *Config) { c.Address = filepath.Join(t.TempDir(), "none.sock") },
	} {
		cfg := config(t, s)
		change(&cfg)
		if _, err := openConfig(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// BenchmarkStart measures the start of a container up to its running program, and its removal.
func BenchmarkStart(b *testing.B) {
	s := containerdtest.Start(b)
	r, err := openConfig(Config{Address: s.Address, Namespace: s.Namespace, Node: s.Namespace, Init: containerdtest.Init(b), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	defer r.Close()
	for b.Loop() {
		p, err := r.Start(b.Context(), sleeper())
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		_ = p.Signal(syscall.SIGKILL)
		p.Wait()
		p.Forget()
		r.removes.Wait()
		b.StartTimer()
	}
}
