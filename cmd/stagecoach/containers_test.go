package main

import (
	"fmt"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	containerd "github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// containerFlags starts a containerd, and returns it with the flags for it. stagecoach-init is
// beside this program, as make build puts it.
func containerFlags(t *testing.T) (*containerdtest.Server, []string) {
	t.Helper()
	s := containerdtest.Start(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	beside := filepath.Join(filepath.Dir(self), "stagecoach-init")
	if err := os.Symlink(containerdtest.Init(t), beside); err != nil && !os.IsExist(err) {
		t.Fatal(err)
	}
	return s, []string{"--runtime", "containerd", "--containerd-address", s.Address, "--containerd-namespace", s.Namespace}
}

// containersOf returns the containers of a function.
func containersOf(t *testing.T, s *containerdtest.Server, function string) []containerd.Container {
	t.Helper()
	all, err := s.Client(s.Namespace).Containers(t.Context(), fmt.Sprintf(`labels."stagecoach.dev/function"==%q`, function+".openfaas-fn"))
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// containerOf returns the namespace of process numbers that a process is in.
func containerOf(t *testing.T, pid int) string {
	t.Helper()
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid))
	if err != nil {
		t.Error(err)
	}
	return name
}

// forksOf returns the replicas of an image that are forks in the containers of s.
func forksOf(image string, s *containerdtest.Server) (pids []int) {
	all := allProcesses()
	shims := s.Shims()
	parent := map[int]int{}
	for _, p := range all {
		parent[p.pid] = p.parent
	}
	for _, p := range all {
		// Its parents are the zygote, the container's first program, and the shim.
		if p.image == image && slices.Contains(shims, parent[parent[p.parent]]) && !spare(p.pid) {
			pids = append(pids, p.pid)
		}
	}
	return pids
}

// TestFunctionsInContainers runs functions of each kind under containerd: forks of a zygote, a
// stage without parameters, a program that speaks HTTP, and a program per request. Then up is
// killed.
func TestFunctionsInContainers(t *testing.T) {
	s, flags := containerFlags(t)
	r := start(t, append(flags, "--log", "debug")...)
	one := map[string]string{"min": "1"}
	perRequest := httpFn("cat", one)
	perRequest.env = map[string]string{"fprocess": "cat", "mode": "streaming"}
	r.deployAll(waitFn("wait", "10ms", map[string]string{"min": "2"}, nil), fn{name: "text", image: "ocr-text", labels: one}, httpFn("web", one), perRequest)
	serve := func() {
		t.Helper()
		r.must(http.StatusOK, http.MethodPost, "/function/wait", "x")
		r.must(http.StatusBadRequest, http.MethodPost, "/function/text", "not JSON")
		if a := r.must(http.StatusOK, http.MethodPost, "/function/cat", "through cat"); string(a.Body) != "through cat" {
			t.Errorf("cat: %q", a.Body)
		}
		if a := r.must(http.StatusOK, http.MethodPost, "/function/web", "x"); !strings.Contains(string(a.Body), `"body":"x"`) {
			t.Errorf("web: %s", a.Body)
		}
	}
	serve()
	r.until(late, "two replicas", func() bool { return r.shows("wait").AvailableReplicas == 2 })

	all := containersOf(t, s, "wait")
	if len(all) != 1 {
		t.Fatalf("%d containers of wait, want one: a zygote and its forks", len(all))
	}
	pids := forksOf("wait", s)
	if len(pids) != 2 {
		t.Fatalf("forks %v, want two", pids)
	}
	task, err := all[0].Task(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		if containerOf(t, pid) != containerOf(t, int(task.Pid())) {
			t.Errorf("replica %d is not in the container", pid)
		}
	}
	first, family := pidsGroups(t, int(task.Pid())), regexp.MustCompile("^(.*/family-zygote-[^/]*)(/zygote-[^/]*)?$")
	for controller, of := range first {
		for _, pid := range pids {
			switch group, own := pidsGroups(t, pid)[controller], family.FindStringSubmatch(of); {
			case own != nil && (path.Dir(group) != own[1] || !strings.HasPrefix(path.Base(group), "child-")):
				t.Errorf("replica %d is in the group %s of %s, want one of its own below the container's, %s", pid, group, controller, own[1])
			case own == nil && group != of:
				t.Errorf("replica %d is in the group %s of %s, want the container's, %s", pid, group, controller, of)
			}
		}
	}
	if !strings.Contains(fmt.Sprint(first), "/family-zygote-") {
		t.Errorf("the container is in the groups %v, want its family's among them", first)
	}
	if containerOf(t, pids[0]) == containerOf(t, os.Getpid()) {
		t.Error("replicas are in no container")
	}

	// A replica that is killed is reported with its cause, and another one is forked.
	if err := unix.Kill(pids[0], unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	r.until(late, "another replica", func() bool {
		now := forksOf("wait", s)
		return len(now) == 2 && !slices.Contains(now, pids[0]) && r.shows("wait").AvailableReplicas == 2
	})
	if n := len(containersOf(t, s, "wait")); n != 1 {
		t.Errorf("%d containers of wait after a fork, want one", n)
	}

	left := forksOf("wait", s)
	r.end9()
	for _, pid := range left {
		proctest.Gone(t, pid)
	}
	r.restart()
	serve()
	r.stop()
	proctest.Until(t, "nothing is left", func() bool {
		left, err := s.Client(s.Namespace).Containers(t.Context())
		return err == nil && len(left) == 0 && len(s.Shims()) == 0
	})
}

// TestContainersAreAdopted kills a node's daemon. Its containers serve on, and the next daemon
// adopts them.
func TestContainersAreAdopted(t *testing.T) {
	s, flags := containerFlags(t)
	n := startNodes(t, "--no-node")
	d := n.daemon("node-a", flags...)
	n.deployAll(waitFn("wait", "10ms", map[string]string{"min": "2"}, nil))
	n.steady("wait", 2, "node-a")
	before := n.running("node-a", "wait")
	if err := d.Cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-d.Done
	n.must(http.StatusOK, http.MethodPost, "/function/wait", "x")
	n.restartDaemon(d)
	n.until(late, "the same replicas", func() bool { return slices.Equal(before, n.running("node-a", "wait")) })
	n.must(http.StatusOK, http.MethodPost, "/function/wait", "x")
	// The end of an adopted fork is reported by its zygote, with the number in the container.
	inv, _ := n.inventory("node-a")
	for _, p := range inv.Replicas {
		if p.Function == "wait.openfaas-fn" {
			kill9(t, p.PID)
		}
	}
	n.until(late, "two other replicas", func() bool {
		now := n.running("node-a", "wait")
		return len(now) == 2 && now[0] != before[0] && now[1] != before[1] && n.shows("wait").AvailableReplicas == 2
	})
	if all := containersOf(t, s, "wait"); len(all) != 1 {
		t.Errorf("%d containers, want the one of the first daemon", len(all))
	}
}
