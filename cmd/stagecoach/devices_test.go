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

	"github.com/stagecoach-serving/stagecoach/node"
)

// TestDevices runs up beside a library in place of NVIDIA's, with two GPUs: replicas have one each and see no other, what is
// reserved is nobody else's, a GPU that is lost is drained and used again when it is back.
func TestDevices(t *testing.T) {
	lib, lost := t.TempDir(), t.TempDir()
	if out, err := exec.Command("cc", "-shared", "-fPIC", "-o", filepath.Join(lib, "libnvidia-ml.so.1"), "testdata/nvml/nvml.c").CombinedOutput(); err != nil {
		t.Fatalf("cc: %v\n%s", err, out)
	}
	t.Setenv("LD_LIBRARY_PATH", lib)
	t.Setenv("FAKE_NVML", lost)
	r := start(t)
	c := &cli{t, t.TempDir(), r.base}
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
	// holds says which devices the replicas of whole have, and checks that each sees its own.
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
	const gpu0, gpu1 = "GPU-00000000-aaaa", "GPU-00000001-aaaa"
	both := func() bool { return slices.Equal(holds(), []string{gpu0, gpu1}) }
	r.until(late, "a replica on each device", both)
	c.run(`(?m)^0 +`+gpu0+` +Fake GPU +10 GiB +0 B +10 GiB +0 B +25% +well$`, "", "node", "describe", host)
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
	if !slices.ContainsFunc(r.events("whole", "draining"), func(e event) bool {
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
