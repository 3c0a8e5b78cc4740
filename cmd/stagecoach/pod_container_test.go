package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/child"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// chartPod runs the container of the Helm chart's DaemonSet in runc, with the command, the rights
// and the read-only folders that a kubelet and containerd give it.
type chartPod struct {
	t       *testing.T
	dir, id string
	mounts  []specs.Mount
	args    []string
	caps    []string
	netns   string
	log     *logFile
	*child.Process
}

// needRunc skips the test if runc cannot run here.
func needRunc(t *testing.T) {
	t.Helper()
	needRoot(t)
	if _, err := exec.LookPath("runc"); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
}

// newChartPod returns a pod of the chart on another machine, which joins the control plane of n.
func newChartPod(n *nodesRig, m *lan) *chartPod {
	t := n.t
	t.Helper()
	p := &chartPod{t: t, dir: t.TempDir(), netns: m.netns, log: &logFile{}}
	p.id = "stagecoach-" + filepath.Base(m.netns)
	var of renderedContainer
	for _, o := range readRendered(t, "../../scripts/chart/testdata/golden/minimal.yaml") {
		if o.Kind == "DaemonSet" {
			of = o.Spec.Template.Spec.Containers[0]
		}
	}
	if of.SecurityContext.Privileged || len(of.Args) == 0 {
		t.Fatalf("container of the DaemonSet: %+v, want one that is not privileged", of)
	}
	p.caps = of.SecurityContext.Capabilities.Add
	variables := strings.NewReplacer("$(NODE_NAME)", "worker-1", "$(POD_IP)", m.far)
	for _, arg := range of.Args {
		p.args = append(p.args, variables.Replace(arg))
	}
	p.args = append(p.args, "--join="+n.url, "--memory=1Gi", "--cpus=1", "--ort=/ort/libonnxruntime.so.1")
	token, err := os.ReadFile(n.token())
	if err != nil {
		t.Fatal(err)
	}
	join := filepath.Join(p.dir, "join")
	p.folder("join", "rootfs", "state")
	if err := os.WriteFile(filepath.Join(join, "token"), token, 0o400); err != nil {
		t.Fatal(err)
	}
	p.bind(filepath.Join(p.dir, "state"), "/state", "rw")
	p.bind(join, "/join", "ro")
	p.bind(filepath.Dir(os.Args[0]), "/program", "ro")
	p.bind(proctest.Built(t, "ort"), "/ort", "ro")
	p.shareSystem()
	t.Cleanup(p.remove)
	return p
}

func (p *chartPod) folder(names ...string) {
	p.t.Helper()
	for _, name := range names {
		err := os.MkdirAll(filepath.Join(p.dir, name), 0o755) //nolint:gosec // functions are other users
		if err != nil {
			p.t.Fatal(err)
		}
	}
}

func (p *chartPod) bind(from, to string, options ...string) {
	p.mounts = append(p.mounts, specs.Mount{Destination: to, Type: "bind", Source: from, Options: append(options, "rbind")})
}

// shareSystem gives the container this machine's programs, in place of those of an image.
func (p *chartPod) shareSystem() {
	p.t.Helper()
	for _, name := range []string{"usr", "bin", "sbin", "lib", "lib64", "etc"} {
		if link, err := os.Readlink("/" + name); err == nil {
			if err := os.Symlink(link, filepath.Join(p.dir, "rootfs", name)); err != nil {
				p.t.Fatal(err)
			}
		} else if _, err := os.Stat("/" + name); err == nil {
			p.bind("/"+name, "/"+name, "ro")
		}
	}
}

// spec describes the container as containerd does for a pod.
func (p *chartPod) spec() *specs.Spec {
	mount := func(at, kind string, options ...string) specs.Mount {
		return specs.Mount{Destination: at, Type: kind, Source: kind, Options: append(options, "nosuid", "nodev")}
	}
	var rights []string
	for _, c := range p.caps {
		rights = append(rights, "CAP_"+c)
	}
	namespaces := []specs.LinuxNamespace{{Type: "pid"}, {Type: "ipc"}, {Type: "uts"}, {Type: "mount"}, {Type: "network", Path: p.netns}}
	if _, err := os.Stat("/sys/fs/cgroup/cgroup.controllers"); err == nil {
		namespaces = append(namespaces, specs.LinuxNamespace{Type: "cgroup"})
	}
	return &specs.Spec{
		Version: specs.Version, Hostname: "worker-1",
		Root: &specs.Root{Path: filepath.Join(p.dir, "rootfs"), Readonly: true},
		Process: &specs.Process{
			Args: append([]string{"/program/" + filepath.Base(os.Args[0])}, p.args...), Cwd: "/",
			Env:          []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", actAsMain + "=1", "GORACE=atexit_sleep_ms=0"},
			Capabilities: &specs.LinuxCapabilities{Bounding: rights, Effective: rights, Permitted: rights},
		},
		Mounts: append([]specs.Mount{
			mount("/proc", "proc", "noexec"),
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666"}},
			mount("/dev/shm", "tmpfs", "noexec", "mode=1777", "size=65536k"), mount("/sys", "sysfs", "noexec", "ro"),
			mount("/sys/fs/cgroup", "cgroup", "noexec", "ro"), mount("/run", "tmpfs", "mode=755"), mount("/tmp", "tmpfs", "mode=1777"),
		}, p.mounts...),
		Linux: &specs.Linux{
			Namespaces: namespaces, CgroupsPath: "/" + p.id + "/pod",
			MaskedPaths:   []string{"/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"},
			ReadonlyPaths: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"},
		},
	}
}

// start starts the container, and returns when the daemon listens, or with its error.
func (p *chartPod) start() (err error) {
	p.t.Helper()
	b, err := json.Marshal(p.spec())
	if err == nil {
		err = os.WriteFile(filepath.Join(p.dir, "config.json"), b, 0o600)
	}
	if err == nil {
		p.Process, err = child.StartProgram(context.Background(), "runc", p.log, "--root", filepath.Join(p.dir, "runc"), "run", "-b", p.dir, p.id)
	}
	return err
}

// runc runs a command of runc. Its errors do not matter, because the container may have ended.
func (p *chartPod) runc(args ...string) {
	_ = p.command(args...).Run()
}

func (p *chartPod) command(args ...string) *exec.Cmd {
	return exec.Command("runc", append([]string{"--root", filepath.Join(p.dir, "runc")}, args...)...)
}

// kill ends the container without a word to the daemon, as if the pod was deleted by force.
func (p *chartPod) kill() {
	p.runc("kill", p.id, "KILL")
	if p.Process != nil {
		<-p.Done
		p.Process = nil
	}
	p.runc("delete", "--force", p.id)
}

// stop ends the daemon as a kubelet does.
func (p *chartPod) stop() {
	p.t.Helper()
	if err := p.Stop(); err != nil {
		p.t.Errorf("the pod ended with %v, want exit status 0", err)
	}
	p.Process = nil
}

func (p *chartPod) remove() {
	p.kill()
	for _, group := range p.groups("") {
		_ = os.Remove(group) // it is empty
	}
	if p.t.Failed() {
		log := p.log.String()
		p.t.Logf("the end of the pod's log:\n%s", log[max(0, len(log)-4000):])
	}
}

// groups returns the folders of cgroups below that of the pod.
func (p *chartPod) groups(below string) []string {
	v1, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup/*", p.id, below))
	v2, _ := filepath.Glob(filepath.Join("/sys/fs/cgroup", p.id, below))
	return append(v1, v2...)
}

// warnings returns what the daemon warns of, but connections with the certificate of an earlier
// node.
func (p *chartPod) warnings() (out []string) {
	for line := range strings.Lines(p.log.String()) {
		if strings.Contains(line, "bad certificate") || strings.Contains(line, "others are asked") {
			continue
		}
		if strings.Contains(line, `"level":"WARN"`) || strings.Contains(line, `"level":"ERROR"`) || strings.Contains(line, "not isolated") {
			out = append(out, line)
		}
	}
	return out
}

// node returns the name of the pod's node, once it is heard.
func (p *chartPod) node(n *nodesRig) (name string) {
	p.t.Helper()
	n.until(soon, "the pod to be heard", func() bool {
		for _, i := range n.watch.Inventories() {
			if strings.HasPrefix(i.Name, "worker-1-") {
				name = i.Name
			}
		}
		return name != ""
	})
	return name
}

// rootImage stores an image that has its own root, in a folder of images.
func rootImage(t *testing.T, images, name string) {
	t.Helper()
	build, files := t.TempDir(), t.TempDir()
	if err := os.WriteFile(filepath.Join(build, "main.go"), []byte(rootProgram), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "build", "-o", filepath.Join(files, "who"), filepath.Join(build, "main.go"))
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	s, err := image.OpenStore(image.Folder(images))
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	img, err := image.Pack(files, image.Config{Entrypoint: []string{"/who"}, Env: []string{"VERSION=1", "fprocess=/who"}})
	if err == nil {
		_, err = s.Add(t.Context(), img, name)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestPodOfTheChart runs functions in a container with the rights of the chart's DaemonSet: one
// that attacks, one with a model, and one whose image has its own root. They are as isolated as on
// a machine. The container is killed, and starts again on its state. Then each capability is taken
// away in turn, and something must be missing.
func TestPodOfTheChart(t *testing.T) {
	needRunc(t)
	m := newLAN(t)
	t.Parallel()
	images := attackers(t)
	rootImage(t, images, "test/who:1")
	n := startNodes(t, "--no-node", "--nats-listen", m.near+":0", "--images", images)
	p := newChartPod(n, m)
	if err := p.start(); err != nil {
		t.Fatalf("%v\n%s", err, p.log)
	}
	name := p.node(n)
	n.must(http.StatusCreated, http.MethodPost, "/system/secrets", `{"name":"key","value":"s3cret"}`, "Content-Type", "application/json")
	n.must(http.StatusAccepted, http.MethodPost, "/system/functions", `{"service":"who","image":"test/who:1","secrets":["key"]}`, "Content-Type", "application/json")
	hostile := map[string]string{"fprocess": "./hostile", "mode": "streaming"}
	n.deployAll(fn{"hostile", "test/hostile:1", map[string]string{"min": "1", "max": "1"}, nil, hostile}, fn{"wait", "wait", map[string]string{"min": "1", "max": "1"}, nil, map[string]string{"STAGECOACH_MODEL": "model/rec.onnx", "wait_mean": "1ms"}})
	for _, f := range []string{"who", "hostile", "wait"} {
		n.steady(f, 1, name)
	}
	if got := string(n.must(http.StatusOK, http.MethodPost, "/function/who", "x").Body); !strings.Contains(got, "uid=0 pid=1 ") || !strings.Contains(got, "secret=s3cret <nil>") {
		t.Errorf("an image with its own root says %q, want its own processes and the secret", got)
	}
	n.must(http.StatusOK, http.MethodPost, "/function/wait", "{}")
	got := n.attack("hostile", "get http://gateway.openfaas:8080/function/wait", "tcp "+m.far+":7070", "tcp "+m.far+":9091", "read /state/node/"+suffixFile, "read /join/token")
	if !strings.HasPrefix(got[0], "200") || slices.ContainsFunc(got[1:], func(s string) bool { return s == "reached" || strings.Contains(s, "stagecoach-join") }) || !strings.Contains(got[3]+got[4], "denied") {
		t.Errorf("the attacks had the results %q, want the function reached and nothing else", got)
	}
	if groups := p.groups("pod/stagecoach/*/*replica-*"); len(groups) < 2 {
		t.Errorf("cgroups of replicas below the pod's: %v, want two or more", groups)
	}
	if w := p.warnings(); len(w) > 0 {
		t.Errorf("the daemon warns: %s", w)
	}
	p.checkProc()
	p.kill()
	if err := p.start(); err != nil {
		t.Fatalf("start after a kill: %v\n%s", err, p.log)
	}
	n.until(soon, "the function to answer after a kill", func() bool {
		a, err := n.trySend(http.MethodPost, "/function/who", "x")
		return err == nil && a.Status == http.StatusOK
	})
	if again := p.node(n); again != name || len(n.watch.Inventories()) != 1 {
		t.Errorf("the node is %s after a kill, of %d, want %s alone", again, len(n.watch.Inventories()), name)
	}
	p.stop()
	p.withoutEach(n)
}

// checkProc checks that the daemon has made the settings of its network writable, and no others,
// which would be those of the machine.
func (p *chartPod) checkProc() {
	p.t.Helper()
	for file, want := range map[string]bool{"net/ipv4/ip_forward": true, "kernel/domainname": false, "vm/swappiness": false} {
		script := `x=$(cat "/proc/sys/$1") && echo "$x" > "/proc/sys/$1"`
		out, err := p.command("exec", p.id, "/bin/sh", "-c", script, "sh", file).CombinedOutput()
		if (err == nil) != want || !want && !strings.Contains(string(out), "Read-only file system") {
			p.t.Errorf("write to /proc/sys/%s: %v, %s, want it allowed: %t", file, err, out, want)
		}
	}
}

// lacks has what is missing without a capability, where the daemon does not name the capability.
var lacks = map[string]string{
	"DAC_OVERRIDE": "mount overlay overlay",
	"SETPCAP":      "drop capability",
	"SYS_ADMIN":    "the container needs CAP_SYS_ADMIN",
}

// withoutEach takes each capability away, on a machine with an empty disk. Without it, the daemon
// must not start, or warn, or not be able to start a function, for this reason alone.
func (p *chartPod) withoutEach(n *nodesRig) {
	for _, c := range slices.Clone(p.caps) {
		p.kill()
		if err := os.RemoveAll(filepath.Join(p.dir, "state")); err != nil {
			p.t.Fatal(err)
		}
		p.folder("state")
		all := p.caps
		p.caps = slices.DeleteFunc(slices.Clone(all), func(other string) bool { return other == c })
		p.log = &logFile{}
		want := cmp.Or(lacks[c], "lacks the capabilities "+c)
		found := ""
		if err := p.start(); err != nil {
			found = p.log.String()
		} else {
			n.until(soon, "an answer without "+c, func() bool {
				if found = strings.Join(p.warnings(), ""); strings.Contains(found, want) {
					return true
				}
				a, err := n.trySend(http.MethodPost, "/function/who", "x")
				found = fmt.Sprint(strings.Join(p.warnings(), ""), err, string(a.Body))
				return err == nil && a.Status == http.StatusOK || strings.Contains(string(a.Body), "start /who in root")
			})
		}
		if !strings.Contains(found, want) {
			p.t.Errorf("without %s: %s, want %q; leave it out of the chart if nothing is missing", c, found, want)
		}
		p.t.Logf("without %s: %.300s", c, found)
		p.caps = all
	}
	p.kill()
}
