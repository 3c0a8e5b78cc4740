package main

import (
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// quota returns the CPU limit of a process's cgroup, in thousandths of a core; 0: none.
func quota(t *testing.T, pid int) int {
	t.Helper()
	milli, err := quotaOf(pid)
	if err != nil {
		t.Fatal(err)
	}
	return milli
}

// quotaOf returns the quota of a process that may be ending.
func quotaOf(pid int) (int, error) {
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(groups)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		var fields []string
		switch {
		case strings.Contains(","+f[1]+",", ",cpu,"):
			for _, name := range []string{"cpu.cfs_quota_us", "cpu.cfs_period_us"} {
				b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup/cpu", f[2], name))
				if err != nil {
					return 0, err
				}
				fields = append(fields, strings.TrimSpace(string(b)))
			}
		case f[1] == "" && len(f[2]) > 1: // version 2
			b, err := os.ReadFile(filepath.Join("/sys/fs/cgroup", f[2], "cpu.max"))
			if err != nil {
				continue
			}
			fields = strings.Fields(string(b))
		default:
			continue
		}
		if fields[0] == "max" || fields[0] == "-1" {
			return 0, nil
		}
		of, err := strconv.Atoi(fields[0])
		period, err2 := strconv.Atoi(fields[1])
		if err != nil || err2 != nil || period == 0 {
			return 0, fmt.Errorf("quota %q", fields)
		}
		return of * 1000 / period, nil
	}
	return 0, fmt.Errorf("process %d is in no group with a quota:\n%s", pid, groups)
}

// poolThreads returns how many threads compute in a process besides the calling one.
func poolThreads(pid int) (n int) {
	names, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/comm", pid))
	for _, name := range names {
		if b, _ := os.ReadFile(name); string(b) == "ort-pool\n" { // it may have ended
			n++
		}
	}
	return n
}

// TestCPUOfARunningReplica applies plans that change the CPU limit of a running, forked replica.
// The quota of its cgroup must change, and it must compute with one thread per core of the limit.
// The test makes the plans itself, because no policy sets limits yet.
func TestCPUOfARunningReplica(t *testing.T) {
	needGroups(t)
	t.Parallel()
	cfg, log, err := upConfig([]string{
		"--listen", "127.0.0.1:0", "--state", t.TempDir(), "--images", proctest.Built(t, "images"),
		"--ort", proctest.Built(t, "ort", "libonnxruntime.so.1"), "--log", "error",
	})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Control.Tick = time.Hour // its plans have no shares
	u, err := newUp(t.Context(), cfg, log)
	defer func() {
		if err := u.close(); err != nil {
			t.Error(err)
		}
	}()
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(u.handler)
	defer server.Close()
	api := client.New(server.URL)
	d := waitFn("f", "1ms", map[string]string{"min": "1", "max": "1"}, nil).deployment()
	d.Limits = &client.Resources{CPU: "600m"}
	if err := api.Deploy(t.Context(), d); err != nil {
		t.Fatal(err)
	}
	call := func() {
		t.Helper()
		if a, err := api.Do(t.Context(), "POST", "/function/f", "text/plain", []byte("x")); err != nil || a.Status != 200 {
			t.Fatalf("%+v, %v, want an answer", a, err)
		}
	}
	call()
	running := u.nodes.Inventories()[0].Replicas
	if len(running) != 1 || running[0].Path != "fork" {
		t.Fatalf("replicas %+v, want one that was forked", running)
	}
	r := running[0]
	if got, threads := quota(t, r.PID), poolThreads(r.PID); got != 600 || threads != 0 {
		t.Errorf("at first %dm and %d threads in the pool, want 600m and none", got, threads)
	}
	give := func(milli int) {
		s, err := u.local.Observe(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		f := s.Functions[0]
		p := plan.Plan{Epoch: s.Epoch, Rev: s.Rev, At: s.At, Wants: []plan.Want{{
			Function: f.Name, Revision: f.Revision, CPUMilli: milli, Batch: f.Batch, Why: "a test",
			Slots: []plan.Slot{{Replica: r.Name, Node: s.Nodes[0].Name}},
		}}}
		if err := p.Validate(s); err != nil {
			t.Fatal(err)
		}
		if err := u.local.Apply(t.Context(), p); err != nil {
			t.Fatal(err)
		}
	}
	most := min(2000, 1000*runtime.GOMAXPROCS(0))
	for _, tc := range []struct{ give, want, threads int }{
		// Threads that have started are not ended.
		{250, 250, 0}, {0, 600, 0}, {most, most, most/1000 - 1}, {0, 600, most/1000 - 1},
	} {
		proctest.Until(t, fmt.Sprintf("the quota and threads of %dm", tc.give), func() bool {
			give(tc.give) // again, for the loop's own plans may come between while the replica is new
			return quota(t, r.PID) == tc.want && poolThreads(r.PID) == tc.threads
		})
		if call(); poolThreads(r.PID) != tc.threads { // what it was asked for before it has by then
			t.Errorf("given %dm it computes with %d threads of the pool, want %d", tc.give, poolThreads(r.PID), tc.threads)
		}
	}
	if now := u.nodes.Inventories()[0].Replicas; len(now) != 1 || now[0].Name != r.Name || now[0].CPUMilli != 600 {
		t.Errorf("replicas %+v, want %s still, with 600m", now, r.Name)
	}
}
