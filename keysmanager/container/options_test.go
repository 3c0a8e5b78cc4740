package container

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// said runs a shell's script in a root to its end, and returns what it has printed.
func said(t *testing.T, r *Runtime, c sandbox.Command, script string) string {
	t.Helper()
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	c.Argv, c.Stdout, c.Stderr = []string{"/bin/sh", "-c", script}, in, in
	p, err := r.Start(t.Context(), c)
	_ = in.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Forget()
	if err := out.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(out)
	if status := p.Wait(); err != nil || status != 0 {
		t.Errorf("%q ended with %#x, %v: %s", script, status, err, b)
	}
	return string(b)
}

// TestClassChoosesContainerdsRuntime starts a container of each class that the operator has named.
func TestClassChoosesContainerdsRuntime(t *testing.T) {
	s := containerdtest.Start(t)
	cfg := config(t, s)
	cfg.Classes = map[string]string{"plain": runc, "gvisor": "io.containerd.runsc.v1", "absent": "io.containerd.absent.v1"}
	r, err := openConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	c := sleeper()
	c.Options.Class = "plain"
	p := start(t, r, c)
	made, err := s.Client(s.Namespace).LoadContainer(t.Context(), p.id)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := made.Info(t.Context()); err != nil || info.Runtime.Name != runc {
		t.Errorf("runtime %q, %v, want %s", info.Runtime.Name, err, runc)
	}
	if _, err := exec.LookPath("containerd-shim-runsc-v1"); err != nil {
		c.Options.Class = "gvisor"
		if _, err := r.Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), "runtime class gvisor, io.containerd.runsc.v1: containerd: ") || !strings.Contains(err.Error(), "containerd-shim-runsc-v1") {
			t.Errorf("%v, want what containerd says of the missing shim", err)
		}
	}
	c.Options.Class = "absent"
	if _, err := r.Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), "runtime class absent, io.containerd.absent.v1: containerd: ") || !strings.Contains(err.Error(), "containerd-shim-absent-v1") {
		t.Errorf("%v, want what containerd says of the missing shim", err)
	}
	c.Options.Class = "other"
	if _, err := r.Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), `runtime class "other": this node has absent, gvisor, plain (--runtime-classes)`) {
		t.Errorf("%v, want the classes of the node", err)
	}
	if live := List(s.Namespace); len(live) != 1 || live[0].Class != "plain" {
		t.Errorf("%+v, want the container that has started", live)
	}
}

// writeSpecs writes CDI specs for a harmless device, in place of the machine's own.
func writeSpecs(t *testing.T) (hooked string) {
	t.Helper()
	dir := t.TempDir()
	was := specFolders
	specFolders, registry.cache = []string{dir}, nil
	t.Cleanup(func() { specFolders, registry.cache = was, nil })
	hooked = filepath.Join(dir, "hooked")
	// Nothing has such devices.
	if err := unix.Mknod(filepath.Join(dir, "free"), unix.S_IFCHR|0o666, int(unix.Mkdev(60, 0))); err != nil {
		t.Fatal(err)
	}
	library := filepath.Join(proctest.Outside(t), "library")
	if err := os.WriteFile(library, []byte("its library"), 0o644); err != nil {
		t.Fatal(err)
	}
	for file, text := range map[string]string{
		"vendor.yaml": fmt.Sprintf(`{cdiVersion: "0.6.0", kind: vendor.com/device, containerEdits: {env: ["VENDOR=here"]}, devices: [{name: "null", containerEdits: {
			deviceNodes: [{path: /dev/testdev, hostPath: /dev/null}], mounts: [{hostPath: %q, containerPath: /library, options: [ro, bind]}],
			hooks: [{hookName: createRuntime, path: /usr/bin/touch, args: [touch, %q]}]}}, {name: other, containerEdits: {env: ["OTHER=1"]}},
			{name: free, containerEdits: {deviceNodes: [{path: /dev/free, hostPath: %q}]}}]}`, library, hooked, filepath.Join(dir, "free")),
		"gpu.yaml": `{cdiVersion: "0.6.0", kind: nvidia.com/gpu, devices: [{name: GPU-1, containerEdits: {deviceNodes: [{path: /dev/nvidia7, hostPath: /dev/zero}]}}]}`,
		"bad.yaml": `{cdiVersion: "0.6.0", kind: other.com/device`,
	} {
		if err := os.WriteFile(filepath.Join(dir, file), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return hooked
}

// TestCDIGivesDevices starts containers with devices of CDI.
func TestCDIGivesDevices(t *testing.T) {
	s := containerdtest.Start(t)
	rootFor(t)
	hooked := writeSpecs(t)
	cfg := config(t, s)
	cfg.Devices = []string{"vendor.com/device=*", "other.com/device=one"}
	r, err := openConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	const look = "ls /dev/testdev /dev/nvidia7 2>/dev/null; echo x > /dev/testdev && test -c /dev/testdev && stat -c %t:%T /dev/testdev; cat /library; echo $VENDOR"
	c := rooted()
	if text := said(t, r, c, "ls /dev/testdev /library $VENDOR 2>&1 | wc -l"); strings.TrimSpace(text) != "2" {
		t.Errorf("without devices it has some: %s", text)
	}
	c.Options.Devices = []string{"vendor.com/device=null"}
	if text := said(t, r, c, look); text != "/dev/testdev\n1:3\nits libraryhere\n" {
		t.Errorf("%q, want the device, its library and its variable", text)
	}
	if _, err := os.Stat(hooked); err != nil {
		t.Errorf("its hook has not run: %v", err)
	}
	// Its cgroup lets it open a device that no container has otherwise.
	c.Options.Devices = []string{"vendor.com/device=free"}
	if text := said(t, r, c, "(: < /dev/free) 2>&1 || true"); !strings.Contains(text, "No such device or address") {
		t.Errorf("%q, want what the kernel says of a device without a driver", text)
	}
	account := sleeper()
	account.Options.Devices = []string{"vendor.com/device=other"}
	if text := said(t, r, account, "echo $VENDOR $OTHER"); text != "here 1\n" {
		t.Errorf("%q, want its variables", text)
	}
	for want, device := range map[string]string{
		"this node gives functions vendor.com/device=*, other.com/device=one (--cdi-devices)":                                                   "other.com/device=two",
		"has vendor.com/device=none: want one of nvidia.com/gpu=GPU-1, vendor.com/device=free, vendor.com/device=null, vendor.com/device=other": "vendor.com/device=none",
		"bad.yaml": "other.com/device=one",
	} {
		c.Options.Devices = []string{device}
		if _, err := r.Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", device, err, want)
		}
	}
	// A GPU that has a spec comes from it.
	c.Options.Devices, c.GPUs = nil, true
	const gpu = "ls /dev/nvidia7 2>/dev/null || echo none"
	for id, want := range map[string]string{"GPU-1": "/dev/nvidia7\n", "GPU-2": "none\n", "GPU-1,GPU-2": "none\n"} {
		c.Env = map[string]string{envGPUs: id}
		if text := said(t, r, c, gpu); text != want {
			t.Errorf("GPU %s: %q, want %q", id, text, want)
		}
	}
}

// TestBytesOfTheEnvironmentStay has a variable that is no UTF-8.
func TestBytesOfTheEnvironmentStay(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	defer r.Close()
	c := sleeper()
	c.Env = map[string]string{"BYTES": "a\xff\xfeb"}
	if got := said(t, r, c, `printf %s "$BYTES"`); got != c.Env["BYTES"] {
		t.Errorf("%q, want %q", got, c.Env["BYTES"])
	}
}

// TestContainersHaveTheirOwnHostname checks it from inside, and that a container's process cannot
// change it.
func TestContainersHaveTheirOwnHostname(t *testing.T) {
	s := containerdtest.Start(t)
	rootFor(t)
	r := open(t, s)
	defer r.Close()
	for _, c := range []sandbox.Command{sleeper(), rooted()} {
		c.Labels = map[string]string{sandbox.LabelFunction: "ocr.openfaas-fn"}
		text := said(t, r, c, "cat /proc/sys/kernel/hostname; hostname elsewhere 2>/dev/null || echo refused")
		if !strings.HasPrefix(text, "ocr-openfaas-fn-") || !strings.HasSuffix(text, "\nrefused\n") {
			t.Errorf("%q, want a name that begins with its function, and stays", text)
		}
		if found := said(t, r, c, "getent hosts $(cat /proc/sys/kernel/hostname)"); !strings.HasPrefix(found, "127.0.1.1") {
			t.Errorf("its own name is %q, want 127.0.1.1", found)
		}
	}
}

// TestCtrShowsWhatContainersAreFor checks List, and what an operator sees with ctr.
func TestCtrShowsWhatContainersAreFor(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	p := start(t, r, sleeper())
	if all := List(s.Namespace); !slices.Equal(all, []Info{{ID: p.id, Function: "ocr-detect.openfaas-fn", Replica: "zygote-X", PID: p.PID()}}) {
		t.Errorf("%+v, want the container", all)
	}
	if all := List("another node"); len(all) > 0 {
		t.Errorf("%+v of another node, want none", all)
	}
	ctr := func(args ...string) string {
		t.Helper()
		out, err := exec.CommandContext(t.Context(), "ctr", slices.Concat([]string{"-a", s.Address, "-n", s.Namespace}, args)...).CombinedOutput()
		if err != nil {
			t.Fatalf("ctr %s: %v: %s", args, err, out)
		}
		return string(out)
	}
	if fields := strings.Fields(ctr("containers", "ls")); !slices.Equal(fields[3:], []string{p.id, "stagecoach/ocr:1", runc}) {
		t.Errorf("ctr containers ls: %s, want the id, the image and the runtime", fields)
	}
	if text := ctr("tasks", "ls"); !strings.Contains(text, p.id) || !strings.Contains(text, "RUNNING") {
		t.Errorf("ctr tasks ls: %s", text)
	}
	info := ctr("containers", "info", p.id)
	for _, want := range []string{`"stagecoach.dev/function": "ocr-detect.openfaas-fn"`, `"stagecoach.dev/node": "` + s.Namespace, `"stagecoach.dev/replica": "zygote-X"`} {
		if !strings.Contains(info, want) {
			t.Errorf("ctr containers info: want %s in %s", want, info)
		}
	}
	r.Close()
	if all := List(s.Namespace); len(all) > 0 {
		t.Errorf("%+v, want none any more", all)
	}
}
