package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/errdefs"

	"github.com/stagecoach-serving/stagecoach/image/contained"
	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container"
)

// starter is start, or startContained.
type starter func(t *testing.T, flags ...string) *rig

// onEachRuntime runs a test with each runtime.
func onEachRuntime(t *testing.T, test func(t *testing.T, start starter)) {
	t.Helper()
	t.Parallel()
	for name, start := range map[string]starter{runtimeProcess: start, runtimeContainerd: startContained} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, start)
		})
	}
}

// startContained does the same as start with functions in containers. At the end of the test,
// nothing of them may be left.
func startContained(t *testing.T, flags ...string) *rig {
	t.Helper()
	s, runtime := containerFlags(t)
	r := &rig{t: t, log: &logFile{}, state: t.TempDir(), ctr: s}
	t.Cleanup(func() { nothingContained(t, s, nodeID(r.node(), r.state)) })
	return startRig(t, r, append(runtime, flags...)...)
}

// nothingContained waits until a containerd and this machine have nothing that the runtime of a
// node has made.
func nothingContained(t *testing.T, s *containerdtest.Server, nodes ...string) {
	t.Helper()
	s.Run()
	var left []string
	defer func() {
		if t.Failed() && len(left) > 0 {
			t.Logf("left: %s", strings.Join(left, ", "))
		}
	}()
	proctest.Until(t, "nothing to be left of containers", func() bool {
		left = append(inContainerd(t, s), containerFiles(t, nodes...)...)
		return len(left) == 0
	})
}

// inContainerd returns what a containerd has: containers, tasks, snapshots, leases, mounts, folders
// of containers, and the processes of its shims. It leaves out two things: images, which stay until
// they are collected, and the leases of interrupted transfers, which containerd removes when they
// expire.
func inContainerd(t *testing.T, s *containerdtest.Server) (all []string) {
	t.Helper()
	c, err := containerd.New(s.Address, containerd.WithDefaultNamespace(s.Namespace))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	ctx := namespaces.WithNamespace(context.Background(), s.Namespace)
	add := func(kind, id string) { all = append(all, kind+" "+id) }
	containers, err := c.ContainerService().List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range containers {
		add("container", c.ID)
	}
	running, err := c.TaskService().List(ctx, &tasks.ListTasksRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range running.Tasks {
		add("task", task.ID)
	}
	held, err := c.LeasesService().List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	ofImages := map[string]bool{} // snapshots
	for _, l := range held {
		_, expires := l.Labels["containerd.io/gc.expire"]
		if _, image := l.Labels[contained.LabelFolder]; !image && !expires {
			add("lease", l.ID)
			continue
		}
		resources, err := c.LeasesService().ListResources(ctx, l)
		if err != nil && !errdefs.IsNotFound(err) { // its transfer has just ended
			t.Fatal(err)
		}
		for _, r := range resources {
			if r.Type == "snapshots/overlayfs" {
				ofImages[r.ID] = true
			}
		}
	}
	var infos []snapshots.Info
	err = c.SnapshotService("overlayfs").Walk(ctx, func(_ context.Context, i snapshots.Info) error {
		infos = append(infos, i)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for range infos { // the snapshots below those of images
		for _, i := range infos {
			if ofImages[i.Name] && i.Parent != "" {
				ofImages[i.Parent] = true
			}
		}
	}
	for _, i := range infos {
		if !ofImages[i.Name] {
			add("snapshot", i.Name)
		}
	}
	for _, pid := range s.Shims() {
		add("shim", fmt.Sprint(pid))
	}
	for _, folder := range s.Folders() {
		add("folder", folder)
	}
	for _, at := range mountPoints(t) {
		if strings.HasPrefix(at, s.State+"/") || strings.HasPrefix(at, s.Root+"/") {
			add("mount", at)
		}
	}
	return all
}

// stateFiles returns the files in up's state folder. It leaves out those of NATS, whose number
// changes, and caches and images, which stay when their functions are removed.
func (r *rig) stateFiles() (all []string) {
	r.t.Helper()
	err := filepath.WalkDir(r.state, func(path string, e fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist): // it has just gone
			return nil
		case err == nil && slices.Contains([]string{"nats", "cache", "containerd/images"}, strings.TrimPrefix(path, r.state+"/")):
			return fs.SkipDir
		case err == nil:
			all = append(all, "file "+path)
		}
		return err
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return all
}

// mountPoints returns where file systems are mounted.
func mountPoints(t *testing.T) (all []string) {
	t.Helper()
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		all = append(all, strings.Fields(line)[1])
	}
	return all
}

// containerFiles returns what this machine has of the containers of nodes: their folders, the
// mounts in these, and the cgroups of nodes without the groups of all its replicas.
func containerFiles(t *testing.T, nodes ...string) (all []string) {
	t.Helper()
	folders, _ := os.ReadDir(container.Folders) // there are none
	for _, e := range folders {
		b, err := os.ReadFile(filepath.Join(container.Folders, e.Name(), "owner"))
		var of struct{ Node string }
		if err != nil || json.Unmarshal(b, &of) != nil || !slices.Contains(nodes, of.Node) {
			continue
		}
		all = append(all, "folder "+e.Name())
		for _, at := range mountPoints(t) {
			if strings.HasPrefix(at, filepath.Join(container.Folders, e.Name())+"/") {
				all = append(all, "mount "+at)
			}
		}
	}
	for _, node := range nodes {
		all = append(all, groupsBelow(t, node)...)
	}
	return all
}

// pidsGroups returns the path of a process's cgroup by controller.
func pidsGroups(t *testing.T, pid int) map[string]string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for line := range strings.Lines(string(b)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		all[f[1]] = f[2]
	}
	return all
}

// groupsBelow returns the cgroups in the folder of a node, in all hierarchies.
func groupsBelow(t *testing.T, node string) (all []string) {
	t.Helper()
	err := filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil: // it has gone
			return nil
		case e.IsDir() && filepath.Base(filepath.Dir(path)) == node:
			all = append(all, "cgroup "+path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}
