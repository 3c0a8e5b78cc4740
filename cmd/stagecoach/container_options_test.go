package main

import (
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/provider"
)

// TestFunctionsAskForClassesAndDevices deploys functions with annotations of containers, and checks
// what node describe shows of them.
func TestFunctionsAskForClassesAndDevices(t *testing.T) {
	s, flags := containerFlags(t)
	r := start(t, append(flags, "--runtime-classes", "plain=io.containerd.runc.v2,absent=io.containerd.absent.v1", "--cdi-devices", "vendor.example/device=*")...)
	c := &operator{t, t.TempDir(), r.Base}
	one := map[string]string{"min": "1"}
	plain := map[string]string{"runtime-class": "plain", "drop-capabilities": "ALL"}
	web := httpFn("web", one)
	web.annotations = plain
	r.deployAll(waitFn("wait", "10ms", one, plain), waitFn("other", "10ms", one, nil), web)
	for _, name := range []string{"wait", "other", "web"} {
		r.must(http.StatusOK, http.MethodPost, "/function/"+name, "x")
	}

	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	var n node.Inventory
	if err := json.Unmarshal([]byte(c.run("", "", "node", "describe", host, "--json")), &n); err != nil {
		t.Fatal(err)
	}
	classes := map[string]string{}
	for _, at := range n.Containers {
		name := strings.TrimSuffix(at.Function, ".openfaas-fn")
		classes[name] = at.Class
		if all := containersOf(t, s, name); len(all) != 1 || all[0].ID() != at.ID {
			t.Errorf("%v of %s, want container %s alone", all, name, at.ID)
		}
		if containerOf(t, at.PID) == containerOf(t, os.Getpid()) {
			t.Errorf("process %d of %s is in no container", at.PID, at.ID)
		}
		c.run(`(?m)^`+at.ID+` +`+at.Function+` +\d+ +\S+ +(plain|-)$`, "", "node", "describe", host)
	}
	if len(classes) != 3 || classes["wait"] != "plain" || classes["other"] != "" || classes["web"] != "plain" {
		t.Errorf("classes %v, want those of the annotations", classes)
	}

	// What the operator does not allow is refused.
	refused := func(name, value, want string) {
		t.Helper()
		err := r.Deploy(t.Context(), waitFn("refused", "10ms", one, map[string]string{name: value}).deployment())
		if err == nil || !strings.Contains(strings.ReplaceAll(err.Error(), `\"`, `"`), want) {
			t.Errorf("%s: %v, want %s", name, err, want)
		}
	}
	refused("runtime-class", "gvisor", `annotations["stagecoach.dev/runtime-class"]: got "gvisor", want a runtime class that the operator allows (up --runtime-classes): absent, plain`)
	refused("cdi-devices", "other.example/device=a", `annotations["stagecoach.dev/cdi-devices"]: got "other.example/device=a", want a device that the operator allows (up --cdi-devices): vendor.example/device=*`)
	refused("drop-capabilities", "FLY", `annotations["stagecoach.dev/drop-capabilities"]: got "FLY", want ALL, or capabilities of Linux`)

	// What containerd lacks is said by the function's status.
	r.deployAll(
		fn{"nowhere", "noop", one, map[string]string{"runtime-class": "absent"}, nil},
		fn{"bare", "noop", one, map[string]string{"cdi-devices": "vendor.example/device=a"}, nil},
	)
	for name, want := range map[string]string{"nowhere": "containerd-shim-absent-v1", "bare": "no spec in /etc/cdi, /var/run/cdi has vendor.example/device=a"} {
		r.until(late, want, func() bool {
			f := r.shows(name)
			return strings.Contains(f.Annotations[provider.FailureAnnotation]+f.Annotations[provider.StatusAnnotation], want)
		})
	}
	r.stop()
}

// TestProgramsGiveUpCapabilities runs a program that is root in its image, in both runtimes, with
// and without the annotation.
func TestProgramsGiveUpCapabilities(t *testing.T) {
	images, folder := t.TempDir(), t.TempDir()
	build := exec.Command("go", "build", "-o", filepath.Join(folder, "probe"), "../../keysmanager/sandbox/testdata/probe")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	store, err := image.OpenStore(image.Folder(images))
	if err != nil {
		t.Fatal(err)
	}
	img, err := image.Pack(folder, image.Config{Entrypoint: []string{"/probe"}})
	if err == nil {
		_, err = store.Add(t.Context(), img, "rooted/probe:1")
	}
	store.Close()
	if err != nil {
		t.Fatal(err)
	}
	for name, flags := range map[string]func(t *testing.T) []string{
		"process":    func(*testing.T) []string { return nil },
		"containerd": func(t *testing.T) []string { _, flags := containerFlags(t); return flags },
	} {
		t.Run(name, func(t *testing.T) {
			r := start(t, append(flags(t), "--images", images)...)
			for service, drop := range map[string]string{"all": "", "some": "CHOWN, CAP_NET_BIND_SERVICE", "none": "ALL"} {
				f := fn{service, "rooted/probe:1", map[string]string{"min": "1"}, nil, map[string]string{"mode": "streaming", "fprocess": "/probe status=CapEff"}}
				if drop != "" {
					f.annotations = map[string]string{"drop-capabilities": drop}
				}
				r.deployAll(f)
				want := map[string]string{"all": "CapEff: 00000000a00405fb\n", "some": "CapEff: 00000000a00401fa\n", "none": "CapEff: 0000000000000000\n"}[service]
				if a := r.must(http.StatusOK, http.MethodPost, "/function/"+service, ""); string(a.Body) != want {
					t.Errorf("%s: %q, want %q", service, a.Body, want)
				}
			}
			r.stop()
		})
	}
}

// TestProcessesRefuseClassesAndDevices checks a node without containers.
func TestProcessesRefuseClassesAndDevices(t *testing.T) {
	t.Parallel()
	r := start(t, "--runtime-classes", "plain=io.containerd.runc.v2")
	one := map[string]string{"min": "1"}
	r.deployAll(fn{"enclosed", "noop", one, map[string]string{"runtime-class": "plain"}, nil})
	r.until(late, "the node refuses it", func() bool {
		f := r.shows("enclosed")
		return strings.Contains(f.Annotations[provider.FailureAnnotation]+f.Annotations[provider.StatusAnnotation], "annotation stagecoach.dev/runtime-class is plain, and this node starts processes")
	})
	err := r.Deploy(t.Context(), fn{"equipped", "noop", one, map[string]string{"cdi-devices": "vendor.example/device=a"}, nil}.deployment())
	if err == nil || !strings.Contains(err.Error(), "want no device: the operator allows none (up --cdi-devices)") {
		t.Errorf("%v, want what is allowed", err)
	}
}
