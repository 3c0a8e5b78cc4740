package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/provider/client"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// The devices of twoGPUs.
const gpu0, gpu1 = "GPU-00000000-aaaa", "GPU-00000001-aaaa"

// twoGPUs makes the programs that the test starts load a library in place of NVIDIA's. The library
// knows two GPUs. A GPU is lost while the folder has a file named by its index.
func twoGPUs(t *testing.T) (lost string) {
	t.Helper()
	lib, lost := t.TempDir(), t.TempDir()
	if out, err := exec.Command("cc", "-shared", "-fPIC", "-o", filepath.Join(lib, "libnvidia-ml.so.1"), "testdata/nvml/nvml.c").CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	t.Setenv("LD_LIBRARY_PATH", lib)
	t.Setenv("FAKE_NVML", lost)
	return lost
}

// TestDevices runs up with a fake NVML that has two GPUs. Each replica gets one GPU and sees no
// other. The memory of a GPU that a replica has reserved goes to no other replica. A lost GPU is
// drained, and is used again when it returns.
func TestDevices(t *testing.T) {
	lost := twoGPUs(t)
	r := start(t)
	c := &operator{t, t.TempDir(), r.Base}
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	one := map[string]string{"gpu": "1"}
	r.deployAll(fn{"whole", "noop", map[string]string{"min": "2", "max": "2"}, one, nil}, fn{"without", "noop", nil, nil, nil})
	describe := func() (n node.Inventory) {
		t.Helper()
		if err := json.Unmarshal([]byte(c.run("", "", "node", "describe", host, "--json")), &n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	// holds returns the devices that the replicas of the function "whole" have, and checks that
	// each replica sees its own.
	holds := func() (devices []string) {
		t.Helper()
		for _, p := range describe().Replicas {
			env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.PID))
			if err == nil && !bytes.Contains(env, []byte("\x00CUDA_VISIBLE_DEVICES="+p.Device+"\x00")) && !bytes.HasPrefix(env, []byte("CUDA_VISIBLE_DEVICES="+p.Device+"\x00")) {
				t.Errorf("replica %s of device %q does not see that alone: %q", p.Name, p.Device, env)
			}
			if p.Function == "whole.openfaas-fn" {
				devices = append(devices, p.Device)
			}
		}
		slices.Sort(devices)
		return devices
	}
	both := func() bool { return slices.Equal(holds(), []string{gpu0, gpu1}) }
	r.until(late, "a replica on each device", both)
	c.run(`(?m)^0 +`+gpu0+` +Fake GPU +10 GiB +0 B +10 GiB +0 B +0 B +25% +41 °C +62 W +well$`, "", "node", "describe", host)
	r.must(http.StatusOK, http.MethodPost, "/function/whole", "x")

	r.deployAll(fn{"part", "noop", nil, map[string]string{"gpu": "1", "gpu-memory": "1Gi"}, nil})
	r.until(soon, "the third one to be refused", func() bool {
		return strings.Contains(r.shows("part").Annotations["stagecoach.dev/status"], "1 devices with 1 GiB free each, of 2 that are there, 2 of them well")
	})

	if err := os.WriteFile(filepath.Join(lost, "0"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.until(late, "the lost device to be drained", func() bool { return slices.Equal(holds(), []string{gpu1}) })
	c.run(host+` +up .* 2 \(1 not well\) `, "", "node", "list")
	if !slices.ContainsFunc(r.events("whole", "draining"), func(e schema.Event) bool {
		return strings.Contains(e.Cause, "device "+gpu0+" of node "+host+" is not well: it is lost")
	}) {
		t.Errorf("timeline: %+v", r.line("whole").Events)
	}
	healthy := `stagecoach_device_healthy{node="` + host + `",uuid="` + gpu0 + `"}`
	if got := r.value(healthy); got != 0 {
		t.Errorf("%s is %v, want 0", healthy, got)
	}
	r.must(http.StatusOK, http.MethodPost, "/function/whole", "x")
	if err := os.Remove(filepath.Join(lost, "0")); err != nil {
		t.Fatal(err)
	}
	r.until(late, "it to be used again", func() bool {
		return len(holds()) == 2 || slices.ContainsFunc(describe().Replicas, onDevice("part", gpu0))
	})
	if got := r.value(healthy); got != 1 {
		t.Errorf("%s is %v, want 1", healthy, got)
	}
}

func onDevice(function, device string) func(node.Replica) bool {
	return func(r node.Replica) bool { return strings.HasPrefix(r.Function, function+".") && r.Device == device }
}

// TestOutOfMemory has stages that find their device too full, during a call or a start. Both then
// run on the other device. A stage that fits on no device reports that, and is not tried in a loop.
func TestOutOfMemory(t *testing.T) {
	twoGPUs(t)
	images := t.TempDir()
	stage := filepath.Join(images, "test", "crowded", "1", "stage")
	if out, err := exec.Command("go", "build", "-o", stage, "./testdata/crowded").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	t.Run("in up", func(t *testing.T) {
		host, err := os.Hostname()
		if err != nil {
			t.Fatal(err)
		}
		testOutOfMemory(t, start(t, "--images", images), host)
	})
	t.Run("in a daemon", func(t *testing.T) {
		n := startNodes(t, "--no-node", "--images", images)
		n.daemon("n1", "--images", images, "--devices", "all")
		testOutOfMemory(t, n.rig, "n1")
	})
}

func testOutOfMemory(t *testing.T, r *rig, host string) {
	c := &operator{t, t.TempDir(), r.Base}
	small := map[string]string{"gpu": "1", "gpu-memory": "1Gi"}
	deploy := func(name, kind, devices string) {
		t.Helper()
		r.deployAll(fn{name, "test/crowded:1", nil, small, map[string]string{kind: devices}})
	}
	// wantBarred checks that a function was kept from these devices, in this order. It must have
	// been started once on each of them; others is the number of its starts on other devices.
	wantBarred := func(name string, others int, devices ...string) {
		t.Helper()
		var got []string
		for _, e := range r.events(name, "barred") {
			device, _, _ := strings.Cut(e.Cause, " ")
			got = append(got, device)
		}
		if n := len(client.ReplicaStarts(r.line(name).Events)); !slices.Equal(got, devices) || n != len(devices)+others {
			t.Errorf("%s was kept from %q in %d starts, want %q and %d others: %+v", name, got, n, devices, others, r.line(name).Events)
		}
	}
	const counter = "stagecoach_device_out_of_memory_total"
	if d := documentedMetrics(t)[counter]; d.kind != "counter" || !slices.Equal(d.labels, []string{"node", "uuid"}) {
		t.Errorf("%s: docs/metrics.md says %+v, want a counter by node and uuid", counter, d)
	}
	memory := func(device string) float64 {
		return r.value(counter + `{node="` + host + `",uuid="` + device + `"}`)
	}

	deploy("calls", "short", gpu0)
	for range 2 {
		if a := r.must(http.StatusOK, http.MethodPost, "/function/calls", "x"); string(a.Body) != gpu1 {
			t.Errorf("answered by a replica on %q, want %s", a.Body, gpu1)
		}
	}
	wantBarred("calls", 1, gpu0)
	c.run(`Status: +ready: (?:.*; )?device `+gpu0+` of node `+host+` is not tried until \d\d:\d\d:\d\d: want 2 GiB, 1 GiB of 10 GiB free`, "", "describe", "calls")
	if n, retries := memory(gpu0), r.value("stagecoach_flow_retries_total"); n != 1 || retries != 1 {
		t.Errorf("%v replicas out of memory and %v retries, want one each", n, retries)
	}

	deploy("starts", "full", gpu0)
	if a := r.must(http.StatusOK, http.MethodPost, "/function/starts", "x"); string(a.Body) != gpu1 {
		t.Errorf("answered by a replica on %q, want %s", a.Body, gpu1)
	}
	wantBarred("starts", 1, gpu0)
	c.run(`Status: .*`+gpu0+`.*: out of memory on device `+gpu0+`: want 2 GiB, 1 GiB of 10 GiB free`, "", "describe", "starts")

	for kind, name := range map[string]string{"short": "nocalls", "full": "nostarts"} {
		deploy(name, kind, gpu0+","+gpu1)
		for range 2 {
			a := r.must(http.StatusServiceUnavailable, http.MethodPost, "/function/"+name, "x")
			for _, part := range []string{"out of memory", gpu0, gpu1, "want 2 GiB, 1 GiB of 10 GiB free", "stagecoach.dev/gpu-memory"} {
				if !strings.Contains(string(a.Body), part) {
					t.Errorf("%s: 503: %s, want %q in it", name, a.Body, part)
				}
			}
			if a.Header.Get("Retry-After") == "" {
				t.Errorf("%s: answered with headers %v, want Retry-After", name, a.Header)
			}
		}
		wantBarred(name, 0, gpu0, gpu1)
	}
}
