package pods

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

const zygote = "zygote-ABCDEFGHIJKLMNOPQRSTUVWXYZ"

// familyOf returns a zygote's pod that runs, whose zygote is this process.
func familyOf(t *testing.T) (*fakeCluster, *Groups) {
	t.Helper()
	c := newFakeCluster(t)
	name := podName("model", zygote)
	c.pods[name] = kube.Pod{Metadata: kube.Meta{Name: name}}
	g := NewGroups(GroupsConfig{Cluster: c.client, Namespaces: []string{"fn"}, Named: named, Cores: 4, Log: quiet()})
	first, err := g.Create(zygote+"/"+zygote, "model.fn", Limits{Memory: 1 << 40})
	if err == nil {
		err = first.Enforce(os.Getpid())
	}
	if err != nil {
		t.Fatal(err)
	}
	return c, g
}

func fork(g *Groups, i int) (*Share, error) {
	return g.Create(fmt.Sprintf("%s/child-%d", zygote, i), "model.fn", Limits{Memory: 100 << 20})
}

// memory returns the request and the limit of a size, without what the zygote and the pod itself
// have.
func memory(t *testing.T, g *Groups, r kube.Resources) (request, limit int64) {
	t.Helper()
	base := g.families[zygote].base
	request, err := strconv.ParseInt(r.Requests["memory"], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if limit, err = strconv.ParseInt(r.Limits["memory"], 10, 64); err != nil {
		t.Fatal(err)
	}
	return request - base - ownMemory, limit - base - 2*ownMemory
}

// TestPodGrowsBeforeForks also takes CPU limits and the end of forks through a pod.
func TestPodGrowsBeforeForks(t *testing.T) {
	c, g := familyOf(t)
	if n := len(c.sizes()); n != 0 {
		t.Fatalf("%d resizes for a zygote, want none: it has what its pod was made with", n)
	}
	var forks []*Share
	for i := range 2 {
		f, err := fork(g, i)
		if err != nil {
			t.Fatal(err)
		}
		sizes := c.sizes()
		request, limit := memory(t, g, sizes[len(sizes)-1])
		if want := int64(i+1) * 100 << 20; request != want || limit != want {
			t.Errorf("before fork %d the pod has %d and %d bytes more than its zygote, want %d", i, request, limit, want)
		}
		forks = append(forks, f)
	}
	last := func() kube.Resources { all := c.sizes(); return all[len(all)-1] }
	for i, want := range []string{"600m", "1100m"} {
		if err := forks[i].SetCPU(500); err != nil {
			t.Fatal(err)
		}
		if got := last().Limits["cpu"]; got != want {
			t.Errorf("with %d limits of 500m, the pod has %s, want %s", i+1, got, want)
		}
	}
	if err := forks[0].SetCPU(0); err != nil {
		t.Fatal(err)
	}
	if got := last(); got.Limits["cpu"] != "4000m" || got.Requests["cpu"] != "510m" {
		t.Errorf("with a fork without limit, the pod has %v, want the machine's 4000m", got)
	}
	for _, f := range forks {
		if err := f.Remove(); err != nil {
			t.Fatal(err)
		}
	}
	if request, limit := memory(t, g, last()); request != 0 || limit != 0 {
		t.Errorf("after the forks, the pod has %d and %d bytes more than its zygote", request, limit)
	}
}

func TestForksAtOnceShareAResize(t *testing.T) {
	c, g := familyOf(t)
	c.hold = make(chan struct{})
	var all sync.WaitGroup
	for i := range 20 {
		all.Go(func() {
			if _, err := fork(g, i); err != nil {
				t.Error(err)
			}
		})
	}
	proctest.Until(t, "all forks", func() bool {
		g.mu.Lock()
		defer g.mu.Unlock()
		return len(g.families[zygote].members) == 21
	})
	close(c.hold)
	all.Wait()
	sizes := c.sizes()
	if request, _ := memory(t, g, sizes[len(sizes)-1]); len(sizes) > 2 || request != 2000<<20 {
		t.Errorf("%d resizes, the last one to %d bytes, want at most 2, and 20 times 100 MiB", len(sizes), request)
	}
}

// TestRefusedResizeIsTheForks refuses the third fork. The first two stay, and the pod goes back.
func TestRefusedResizeIsTheForks(t *testing.T) {
	c, g := familyOf(t)
	most := int64(0)
	c.refuse = func(r kube.Resources) string {
		if n, _ := strconv.ParseInt(r.Requests["memory"], 10, 64); most > 0 && n > most {
			return "Node didn't have enough resource: memory"
		}
		return ""
	}
	for i := range 2 {
		if _, err := fork(g, i); err != nil {
			t.Fatal(err)
		}
	}
	most = g.families[zygote].base + ownMemory + 200<<20
	_, err := fork(g, 2)
	if err == nil || !strings.Contains(err.Error(), "enough resource: memory") {
		t.Fatalf("a fork beyond the machine: %v, want the kubelet's text", err)
	}
	sizes := c.sizes()
	if request, _ := memory(t, g, sizes[len(sizes)-1]); request != 200<<20 {
		t.Errorf("after the refusal, the pod has %d bytes more than its zygote, want those of two forks", request)
	}
}

// TestOldClusterResizesNothing also checks that a pod that is not there is an error.
func TestOldClusterResizesNothing(t *testing.T) {
	c, g := familyOf(t)
	clear(c.pods)
	if _, err := fork(g, 0); err == nil || !strings.Contains(err.Error(), "not found") {
		t.Errorf("a pod that is not there: %v", err)
	}
	c.old = true
	if _, err := fork(g, 1); err != nil || g.fixed.IsZero() {
		t.Errorf("a cluster without resize: %v, fixed until %v", err, g.fixed)
	}
}

// TestMemoryNeverFalls has a cluster that refuses to lower limits on memory, as Kubernetes 1.33
// does. A pod that has lost forks keeps its limit, and later forks start.
func TestMemoryNeverFalls(t *testing.T) {
	c, g := familyOf(t)
	c.grows = true
	var forks []*Share
	for i := range 3 {
		f, err := fork(g, i)
		if err != nil {
			t.Fatal(err)
		}
		forks = append(forks, f)
	}
	for _, f := range forks[1:] {
		if err := f.Remove(); err != nil {
			t.Errorf("the end of a fork: %v", err)
		}
	}
	if _, err := fork(g, 3); err != nil {
		t.Errorf("a fork after others have ended: %v", err)
	}
	sizes := c.sizes()
	if request, limit := memory(t, g, sizes[len(sizes)-1]); request != 200<<20 || limit != 300<<20 {
		t.Errorf("two forks of three: %d and %d bytes more than the zygote, want 200 MiB requested, and the limit of 300 MiB", request, limit)
	}
}

func TestShareLearnsItsProcess(t *testing.T) {
	_, g := familyOf(t)
	f, err := fork(g, 0)
	if err != nil {
		t.Fatal(err)
	}
	files, err := f.Files()
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	if u := f.Usage(); u.Memory != 0 {
		t.Errorf("before its process is known: %v", u)
	}
	if _, err := files[0].WriteString(strconv.Itoa(os.Getpid())); err != nil {
		t.Fatal(err)
	}
	if u := f.Usage(); u.Memory < 1<<20 {
		t.Errorf("usage %v, want this process's", u)
	}
	if err := files[0].Close(); err != nil {
		t.Error(err)
	}
	if err := f.Remove(); err != nil {
		t.Error(err)
	}
}
