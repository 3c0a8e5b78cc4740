package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// startOnSmallDisk runs up with its state on a disk of 256 MiB, which is emptied at the end.
func startOnSmallDisk(t *testing.T) (r *rig, disk string) {
	t.Helper()
	disk = proctest.Disk(t, "256m")
	r = start(t, "--state", disk)
	r.state = disk
	return r, disk
}

// full sends a request that must be refused with 503. The answer must say when to try again, which
// disk is full, and how many bytes are left. Callers of functions get STATE instead of the folder's
// path.
func (r *rig) full(disk string, method, path, body string, header ...string) {
	r.t.Helper()
	if strings.HasPrefix(path, "/function/") || strings.HasPrefix(path, "/async-function/") {
		disk = "STATE"
	}
	a := r.send(method, path, body, header...)
	if _, err := strconv.Atoi(a.Header.Get("Retry-After")); err != nil || a.Status != http.StatusServiceUnavailable ||
		!strings.Contains(string(a.Body), "the disk of "+disk) || !strings.Contains(string(a.Body), "bytes left, want") {
		r.t.Errorf("%s %s on a full disk: status %d, Retry-After %q: %.500s", method, path, a.Status, a.Header.Get("Retry-After"), a.Body)
	}
}

// recovered waits until everything is accepted again.
func (r *rig) recovered() {
	r.t.Helper()
	r.until(late, "readiness", func() bool { return r.send(http.MethodGet, "/readyz", "").Status == http.StatusOK })
	for _, cause := range []string{"low", "stopped"} {
		if v := r.value(fmt.Sprintf(`stagecoach_degraded{cause="%s"}`, cause)); v != 0 {
			r.t.Errorf("degraded %v because of %s, want 0", v, cause)
		}
	}
}

func (r *rig) deployment(name string) string {
	r.t.Helper()
	b, err := json.Marshal(fn{name, "noop", nil, nil, map[string]string{"filler": strings.Repeat("x", 1000)}}.deployment())
	if err != nil {
		r.t.Fatal(err)
	}
	return string(b)
}

// diskRounds is how often a test fills the disk; DISK_ROUNDS makes it more.
func diskRounds(t *testing.T) int {
	t.Helper()
	if v := os.Getenv("DISK_ROUNDS"); v != "" {
		n, err := strconv.Atoi(v)
		if err != nil {
			t.Fatal("DISK_ROUNDS:", err)
		}
		return n
	}
	return 3
}

// TestFullDiskWhileIdle fills the disk to the last byte. Small sync requests and deletions still
// work, also after a restart. Every request that has to store something is refused with the disk's
// name. Once the disk has room again, all requests work, without a restart.
func TestFullDiskWhileIdle(t *testing.T) {
	t.Parallel()
	r, disk := startOnSmallDisk(t)
	back := newReceiver(t)
	r.deployAll(fn{"echo", "noop", map[string]string{"min": "1"}, nil, nil})
	for i := range 3 {
		r.must(http.StatusAccepted, http.MethodPost, "/system/functions", r.deployment(fmt.Sprint("f", i)))
		r.must(http.StatusCreated, http.MethodPost, "/system/secrets", fmt.Sprintf(`{"name":"s%d","value":"v"}`, i))
	}
	r.must(http.StatusOK, http.MethodPost, "/function/echo", "x")
	r.must(http.StatusOK, http.MethodGet, "/readyz", "")
	r.until(late, "the reserve", func() bool { return r.value("stagecoach_disk_free_bytes") < 256<<20-8<<20 })
	large := strings.Repeat("y", 8<<20)
	for round := range 2 {
		free := proctest.Fill(t, disk, 0)
		r.must(http.StatusOK, http.MethodGet, "/healthz", "")
		r.full(disk, http.MethodGet, "/readyz", "")
		r.until(late, "the metric", func() bool { return r.value(`stagecoach_degraded{cause="low"}`) == 1 })
		r.must(http.StatusOK, http.MethodPost, "/function/echo", "x")
		r.full(disk, http.MethodPost, "/function/echo", large)
		r.full(disk, http.MethodPost, "/async-function/echo", "x")
		r.full(disk, http.MethodPost, "/async-function/echo", large)
		r.full(disk, http.MethodPost, "/system/functions", r.deployment("new"))
		r.full(disk, http.MethodPut, "/system/functions", r.deployment("f2"))
		r.full(disk, http.MethodPost, "/system/secrets", `{"name":"new","value":"`+strings.Repeat("v", 1<<16)+`"}`)
		r.full(disk, http.MethodPut, "/system/secrets", `{"name":"s2","value":"`+strings.Repeat("v", 1<<16)+`"}`)
		r.full(disk, http.MethodPost, "/system/namespace/", `{"name":"new"}`)
		r.full(disk, http.MethodPut, "/system/function/f2/profile", `{"version":1,"relative":0.05,"points":[{"cpuMilli":1000,"batch":1,"length":0,"meanSeconds":0.01,"errSeconds":0.0003,"cv":0.2,"n":80}]}`)
		if round == 0 {
			r.must(http.StatusOK, http.MethodGet, "/system/logs?name=echo&follow=0", "") // which is memory
		}
		r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", fmt.Sprintf(`{"functionName":"f%d"}`, round))
		r.must(http.StatusAccepted, http.MethodDelete, "/system/secrets", fmt.Sprintf(`{"name":"s%d"}`, round))
		if round == 1 {
			r.stop()
			r.restart() // on a disk that is still full
			r.must(http.StatusNotFound, http.MethodGet, "/system/function/f1", "")
			r.full(disk, http.MethodPost, "/system/functions", r.deployment("new"))
		}
		free()
		r.recovered()
		r.must(http.StatusAccepted, http.MethodPut, "/system/functions", r.deployment("f2"))
		r.must(http.StatusOK, http.MethodPost, "/function/echo", large)
		r.must(http.StatusAccepted, http.MethodPost, "/async-function/echo", large, "X-Callback-Url", back.URL)
		if c := back.next(t); c.status != "200" || c.body != large {
			t.Errorf("status %s and %d bytes, want 200 and %d", c.status, len(c.body), len(large))
		}
	}
}

// TestFullDiskDuringDeploys fills the disk while functions are deployed, updated and removed. Each
// change either succeeds or is refused with the disk's name, and none hangs. Once the disk has room
// again, changes succeed without a restart.
func TestFullDiskDuringDeploys(t *testing.T) {
	t.Parallel()
	r, disk := startOnSmallDisk(t)
	r.deployAll(fn{"echo", "noop", map[string]string{"min": "1"}, nil, nil})
	r.must(http.StatusOK, http.MethodPost, "/function/echo", "x")
	steady := r.load(2, "/function/echo", func(body string, a client.Answer) error {
		if a.Status != http.StatusOK || string(a.Body) != body {
			return fmt.Errorf("status %d: %.200s", a.Status, a.Body)
		}
		return nil
	})
	var clients sync.WaitGroup
	var mu sync.Mutex
	counts := map[int]int{}
	made := func(status int) int { mu.Lock(); defer mu.Unlock(); return counts[status] }
	stop := make(chan struct{})
	for c := range 4 {
		clients.Go(func() {
			name := fmt.Sprint("f", c)
			there := false
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				default:
				}
				method, body := http.MethodPost, r.deployment(name)
				if there {
					method = http.MethodPut
				}
				if there && i%5 == 4 {
					method, body = http.MethodDelete, fmt.Sprintf(`{"functionName":"%s"}`, name)
				}
				a := r.send(method, "/system/functions", body)
				switch {
				case a.Status == http.StatusAccepted:
					there = method != http.MethodDelete
				case a.Status != http.StatusServiceUnavailable || !strings.Contains(string(a.Body), "the disk of "+disk) || a.Header.Get("Retry-After") == "":
					t.Errorf("%s %s: status %d: %s", method, name, a.Status, a.Body)
				case method == http.MethodDelete:
					t.Errorf("a deletion is refused: %s", a.Body)
				}
				mu.Lock()
				counts[a.Status]++
				mu.Unlock()
			}
		})
	}
	for range diskRounds(t) {
		accepted, refused := made(202), made(503)
		r.until(late, "changes", func() bool { return made(202) >= accepted+20 })
		free := proctest.Fill(t, disk, 0)
		r.until(late, "refusals", func() bool { return made(503) >= refused+20 })
		free()
		r.recovered()
	}
	accepted := made(202)
	r.until(late, "changes", func() bool { return made(202) >= accepted+20 })
	close(stop)
	clients.Wait()
	if n, wrong := steady.end(); n == 0 || len(wrong) > 0 {
		t.Errorf("%d sync requests, wrong: %q", n, wrong)
	}
	t.Logf("changes by status: %v, opened again %v times", counts, r.value("stagecoach_disk_reopened_total"))
}

// TestFullDiskWhileAsyncWaits fills the disk again and again while 100 async requests wait or run.
// Once the disk has room again, each request gets its callback exactly once, without a restart.
func TestFullDiskWhileAsyncWaits(t *testing.T) {
	t.Parallel()
	r, disk := startOnSmallDisk(t)
	back := newReceiver(t)
	r.deployAll(fn{"echo", "noop", map[string]string{"min": "1"}, nil, nil},
		waitFn("slow", "50ms", map[string]string{"min": "1", "max": "1"}, map[string]string{"async-concurrency": "4"}))
	r.must(http.StatusOK, http.MethodPost, "/function/slow", "x")
	body := strings.Repeat("x", 20<<10) // larger than what is left in a file's last page
	const each = 100
	var got []string
	rounds := diskRounds(t)
	for round := range rounds {
		for i := range each {
			r.must(http.StatusAccepted, http.MethodPost, "/async-function/slow", body, "X-Callback-Url", fmt.Sprint(back.URL, "/?", round*each+i))
		}
		got = append(got, back.next(t).query)
		free := proctest.Fill(t, disk, 0)
		r.full(disk, http.MethodPost, "/async-function/slow", "x")
		r.must(http.StatusOK, http.MethodPost, "/function/echo", "x")
		r.until(late, "requests that wait for the disk, or are done", func() bool {
			told := r.value(`stagecoach_async_attempts_total{kind="callback"}`)
			return told == float64((round+1)*each) || r.value(`stagecoach_async_attempts_total{kind="run"}`) > told
		})
		free()
		r.recovered()
		for range each - 1 {
			got = append(got, back.next(t).query)
		}
	}
	r.until(late, "an empty journal", func() bool { return r.value("stagecoach_async_bytes") == 0 })
	if n := r.value("stagecoach_async_dead_letters"); n != 0 {
		t.Errorf("%v dead letters, want none", n)
	}
	slices.Sort(got)
	if got = slices.Compact(got); len(got) != rounds*each || len(back.got) != 0 {
		t.Errorf("%d requests were told, and %d deliveries are left over, want %d and none", len(got), len(back.got), rounds*each)
	}
	t.Logf("opened again %v times", r.value("stagecoach_disk_reopened_total"))
}

// TestFullDiskStopsTheStreams fills the disk and also takes the reserve for deletions. A deletion's
// write fails, and NATS's streams stop with this error. Sync requests still work, and everything
// else is refused at once. Once the disk has room again, all requests work, without a restart.
func TestFullDiskStopsTheStreams(t *testing.T) {
	t.Parallel()
	r, disk := startOnSmallDisk(t)
	back := newReceiver(t)
	r.deployAll(fn{"echo", "noop", map[string]string{"min": "1"}, nil, nil},
		waitFn("slow", "2s", map[string]string{"min": "1"}, nil))
	const most = 100 // deletions that the last pages of files may have room for
	for i := range most {
		r.must(http.StatusAccepted, http.MethodPost, "/system/functions", r.deployment(fmt.Sprint("f", i)))
	}
	r.must(http.StatusOK, http.MethodPost, "/function/slow", "x")
	for range 4 {
		r.must(http.StatusAccepted, http.MethodPost, "/async-function/slow", "x", "X-Callback-Url", back.URL)
	}
	free := proctest.Fill(t, disk, 0)
	if err := os.Remove(filepath.Join(disk, "nats", "reserve")); err != nil {
		t.Fatal(err)
	}
	rest := proctest.Fill(t, disk, 0)
	deletion := func(i int) string { return fmt.Sprintf(`{"functionName":"f%d"}`, i) }
	last := 0
	for a := (client.Answer{Status: http.StatusAccepted}); a.Status == http.StatusAccepted && last < most; last++ {
		a = r.send(http.MethodDelete, "/system/functions", deletion(last))
	}
	r.until(late, "the metric", func() bool { return r.value(`stagecoach_degraded{cause="stopped"}`) == 1 })
	r.full(disk, http.MethodDelete, "/system/functions", deletion(last))
	r.full(disk, http.MethodPost, "/system/functions", r.deployment("new"))
	r.full(disk, http.MethodPost, "/async-function/echo", "x")
	r.full(disk, http.MethodGet, "/readyz", "")
	r.must(http.StatusOK, http.MethodPost, "/function/echo", "x")
	free()
	rest()
	r.recovered()
	if n := r.value("stagecoach_disk_reopened_total"); n < 1 {
		t.Errorf("the streams were opened again %v times, want once or more", n)
	}
	for range 4 {
		if c := back.next(t); c.status != "200" {
			t.Errorf("told %+v, want 200", c)
		}
	}
	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", deletion(last))
	r.must(http.StatusAccepted, http.MethodPost, "/system/functions", r.deployment("new"))
	r.must(http.StatusOK, http.MethodPost, "/function/new", "x")
	r.must(http.StatusAccepted, http.MethodPost, "/async-function/new", "x", "X-Callback-Url", back.URL)
	if c := back.next(t); c.status != "200" {
		t.Errorf("told %+v, want 200", c)
	}
}
