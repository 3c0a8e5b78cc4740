package main

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cgroup"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// needGroups skips a test if cgroups cannot be made. If tests of real parts must run, it fails the
// test.
func needGroups(t *testing.T) {
	t.Helper()
	root, err := cgroup.Open("test-" + strings.ToLower(t.Name()))
	if err == nil {
		_ = root.Close() // empty
		return
	}
	if os.Getenv("CI") == "true" {
		t.Fatalf("CI has to be where cgroups may be made: %v", err)
	}
	t.Skipf("no cgroups may be made here (root may, on most machines): %v", err)
}

// limited is the function echo-http with limits.
func (r *rig) limited(name string, l client.Resources) {
	r.t.Helper()
	d := httpFn(name, map[string]string{"min": "1", "max": "1"}).deployment()
	d.Limits = &l
	if err := r.Deploy(r.t.Context(), d); err != nil {
		r.t.Fatal(err)
	}
}

// TestMemoryAndCPULimitsApply checks two limits. If a function exceeds its memory limit, its caller
// is told so. A function with a CPU limit below one core is throttled.
func TestMemoryAndCPULimitsApply(t *testing.T) {
	needGroups(t)
	onEachRuntime(t, testLimits)
}

func testLimits(t *testing.T, start starter) {
	r := start(t)
	r.limited("eats", client.Resources{Memory: "96Mi"})
	r.limited("spins", client.Resources{CPU: "100m"})
	t.Run("memory", func(t *testing.T) {
		if a := r.must(http.StatusOK, http.MethodPost, "/function/eats/eat?mb=8", ""); string(a.Body) != "8\n" {
			t.Errorf("%q, want 8", a.Body)
		}
		a := r.must(http.StatusBadGateway, http.MethodPost, "/function/eats/eat?mb=512", "")
		if want := "killed: out of memory, its limit is 96 MiB (limits.memory)"; !strings.Contains(string(a.Body), want) {
			t.Errorf("%q, want %q in it", a.Body, want)
		}
		r.until(soon, "the function to serve again", func() bool {
			return r.send(http.MethodPost, "/function/eats/eat?mb=8", "").Status == http.StatusOK
		})
	})
	t.Run("cpu", func(t *testing.T) {
		r.must(http.StatusOK, http.MethodPost, "/function/spins/spin?for=1s", "")
		const sample = `stagecoach_replica_throttled_seconds_total{function="spins.openfaas-fn",node="`
		r.until(soon, "throttling in the metrics", func() bool {
			for line := range strings.Lines(string(r.must(http.StatusOK, http.MethodGet, "/metrics", "").Body)) {
				if strings.HasPrefix(line, sample) && !strings.HasSuffix(line, " 0\n") {
					return true
				}
			}
			return false
		})
		r.until(soon, "throttling in the inventory", func() bool {
			a := r.must(http.StatusOK, http.MethodGet, "/system/nodes/"+r.node(), "")
			var n struct {
				Replicas []struct {
					Function string
					CPUMilli int
					Usage    *struct{ Throttled, Memory int64 }
				}
			}
			if err := json.Unmarshal(a.Body, &n); err != nil {
				t.Fatal(err)
			}
			for _, x := range n.Replicas {
				if x.Function == "spins.openfaas-fn" && x.Usage != nil {
					return x.CPUMilli == 100 && x.Usage.Throttled > 0 && x.Usage.Memory > 0
				}
			}
			return false
		})
		var s struct {
			Usage struct{ TotalMemoryBytes float64 }
		}
		a := r.must(http.StatusOK, http.MethodGet, "/system/function/spins?usage=1", "")
		if err := json.Unmarshal(a.Body, &s); err != nil || s.Usage.TotalMemoryBytes < 1<<20 || s.Usage.TotalMemoryBytes > 96<<20 {
			t.Errorf("%s, %v, want the memory of one replica", a.Body, err)
		}
	})
	r.stop()
	r.restart() // with the groups of no earlier life
	r.must(http.StatusOK, http.MethodPost, "/function/eats/eat?mb=8", "")
}

// TestMissingCgroupsAreLoggedOnce checks that one warning is logged if cgroups cannot be made, and
// that the KeysManager gets no cgroups.
func TestMissingCgroupsAreLoggedOnce(t *testing.T) {
	var log bytes.Buffer
	// No folder can have this name.
	groups, done := openGroups("\x00", t.TempDir(), slog.New(slog.NewTextHandler(&log, nil)))
	done()
	if said := log.String(); groups != nil || strings.Count(said, "\n") != 1 || !strings.Contains(said, `level=WARN msg="no cgroups: functions have no limits`) {
		t.Errorf("got %v, and it says %q, want none and one warning", groups, said)
	}
}

// node is the only node's name.
func (r *rig) node() string {
	r.t.Helper()
	name, err := os.Hostname()
	if err != nil {
		r.t.Fatal(err)
	}
	return name
}
