package container

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A shim is the process between containerd and a container. A containerd that is killed or busy may
// forget a shim, for example while the shim starts. The container's processes, its bundle (the
// folder in which the shim runs) and the state of runc then stay without a container in containerd.
// shims finds and removes them by the container's id.
type shims struct {
	address   string // path of containerd's socket, without links; shims have it as their -address
	namespace string // of containerd
	runc      string // folder in which runc has the states of the namespace's containers
	log       *slog.Logger
	scan      func() map[int]string // all, except in tests

	mu      sync.Mutex
	bundles string // folder of the namespace's bundles; empty: no shim was seen yet
}

// runcStates is the folder in which runc keeps the states of containers, by namespace. Shims tell
// runc to use it.
const runcStates = "/run/containerd/runc"

// shimSockets is the folder of the shims' sockets. Shims derive the names of the sockets.
const shimSockets = "/run/containerd/s"

// Parts of the name of a bundle.
const (
	tasksFolder = "io.containerd.runtime.v2.task" // of containerd, with bundles by namespace
	workLink    = "work"                          // in a bundle: names its folder on the disk
	rootFolder  = "rootfs"                        // in a bundle: the mount of a container's root
)

// Bounds of the waits for shims.
const (
	shimTime  = 3 * time.Second       // for containerd to remove a shim whose container is removed
	shimPause = 50 * time.Millisecond // between two looks
)

func newShims(cfg Config) *shims {
	address, err := filepath.EvalSymlinks(cfg.Address) // /var/run is a link to /run
	if err != nil {
		address = cfg.Address
	}
	s := &shims{address: address, namespace: cfg.Namespace, runc: filepath.Join(runcStates, cfg.Namespace), log: cfg.Log}
	s.scan = s.all
	return s
}

// remnant is what is left of a container that containerd does not have.
type remnant struct {
	shims  []int  // pids of shims, and of their commands such as start and delete
	bundle string // empty: none
	state  string // folder of runc; empty: none
}

func (l remnant) empty() bool { return len(l.shims) == 0 && l.bundle == "" && l.state == "" }

func (l remnant) String() string {
	return fmt.Sprintf("shims %v, bundle %q, state of runc %q", l.shims, l.bundle, l.state)
}

// remove removes what is left of a container. The caller has removed the container from containerd,
// and no start of it is under way. containerd gets a moment to do it itself.
func (s *shims) remove(ctx context.Context, id string) error {
	left := s.left(id)
	for until := time.Now().Add(shimTime); !left.empty() && time.Now().Before(until); left = s.still(id, left) {
		select {
		case <-time.After(shimPause): // no event says that containerd has finished
		case <-ctx.Done():
			return fmt.Errorf("containerd has not removed %v: %w", left, context.Cause(ctx))
		}
	}
	if !left.empty() {
		left = s.left(id) // also commands that have started meanwhile
	}
	if left.empty() {
		return s.removeSocket(id)
	}
	s.log.Warn("containerd has left a part of a container; it is removed", "container", id, "left", left.String())
	for _, pid := range left.shims {
		s.kill(pid, id)
	}
	errs := []error{s.deleteState(ctx, id, left.state), removeBundle(left.bundle)}
	if left = s.left(id); left.empty() {
		return s.removeSocket(id)
	}
	return fmt.Errorf("containerd has left %v: %w", left, errors.Join(errs...))
}

// left looks for what is left of a container, among all processes.
func (s *shims) left(id string) remnant {
	var pids []int
	for pid, of := range s.scan() {
		if of == id {
			pids = append(pids, pid)
		}
	}
	return s.look(id, pids)
}

// still looks again for what is left of a container. It first looks at the shims that were found
// before. Only if nothing is left of these, it reads all other processes, because a machine may
// have thousands of them.
func (s *shims) still(id string, before remnant) remnant {
	pids := slices.DeleteFunc(slices.Clone(before.shims), func(pid int) bool { return s.idOf(pid) != id })
	if l := s.look(id, pids); !l.empty() {
		return l
	}
	return s.left(id)
}

// look returns what is left of a container whose shims are known.
func (s *shims) look(id string, pids []int) (l remnant) {
	var bundles []string // where the bundle may be
	for _, pid := range pids {
		l.shims = append(l.shims, pid)
		if cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid)); err == nil {
			bundles = append(bundles, strings.TrimSuffix(cwd, " (deleted)"))
		}
	}
	slices.Sort(l.shims)
	if state := filepath.Join(s.runc, id); isFolder(state) {
		l.state = state
		bundles = append(bundles, bundleOf(state))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.bundles != "" {
		bundles = append(bundles, filepath.Join(s.bundles, id))
	}
	for _, b := range bundles {
		if !s.isBundle(b, id) {
			continue
		}
		s.bundles = filepath.Dir(b)
		if isFolder(b) {
			l.bundle = b
		}
	}
	return l
}

// learn records the folder of bundles. It gets the folder from the first process of a container:
// the parent of that process is the shim, which runs in its bundle.
func (s *shims) learn(init int, id string) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", init))
	if err != nil {
		return // it has ended
	}
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 2 {
		return
	}
	cwd, err := os.Readlink("/proc/" + fields[1] + "/cwd")
	if err != nil || !s.isBundle(cwd, id) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bundles = filepath.Dir(cwd)
}

// isBundle reports whether a path can be the bundle of a container. Paths come from /proc, where
// programs decide what they are, so other paths are never removed.
func (s *shims) isBundle(path, id string) bool {
	return filepath.IsAbs(path) && strings.HasSuffix(path, filepath.Join("/", tasksFolder, s.namespace, id))
}

// bundleOf returns the bundle that a state of runc names; empty: none.
func bundleOf(state string) string {
	var of struct {
		Config struct {
			Labels []string `json:"labels"`
		} `json:"config"`
	}
	b, err := os.ReadFile(filepath.Join(state, "state.json"))
	if err != nil || json.Unmarshal(b, &of) != nil {
		return "" // runc was killed before it has written the file
	}
	for _, label := range of.Config.Labels {
		if path, ok := strings.CutPrefix(label, "bundle="); ok {
			return path
		}
	}
	return ""
}

// all returns the shims of the namespace, and the commands with which containerd starts and deletes
// shims. The result has the ids of their containers by pid.
func (s *shims) all() map[int]string {
	all := map[int]string{}
	entries, _ := os.ReadDir("/proc") // without /proc, no process is found
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if id := s.idOf(pid); id != "" {
				all[pid] = id
			}
		}
	}
	return all
}

// shimName is how the names of shims begin. The kernel cuts a process's name to 15 bytes.
const shimName = "containerd-shim"

// idOf returns the id of a shim's container; empty: the process is no shim of the namespace.
// Programs of functions may have any name and arguments, but their process ids are in another
// namespace. Their command lines are not read, because reading could wait for them.
func (s *shims) idOf(pid int) string {
	dir := fmt.Sprintf("/proc/%d/", pid)
	comm, err := os.ReadFile(dir + "comm")
	if err != nil || string(bytes.TrimSpace(comm)) != shimName || !samePIDs(dir) {
		return ""
	}
	line, err := os.ReadFile(dir + "cmdline") // empty for a process that has ended
	if err != nil {
		return ""
	}
	args := strings.Split(string(line), "\x00")
	value := func(flag string) string {
		if i := slices.Index(args, flag); i >= 0 && i+1 < len(args) {
			return args[i+1]
		}
		return ""
	}
	if value("-namespace") != s.namespace || value("-address") != s.address {
		return ""
	}
	return value("-id")
}

// samePIDs reports whether a process is in the same namespace of process ids as this one.
func samePIDs(dir string) bool {
	own, err := os.Readlink("/proc/self/ns/pid")
	its, err2 := os.Readlink(dir + "ns/pid")
	return err == nil && err2 == nil && own == its
}

// kill kills a shim and its children: the first process of the container, or a runc under way.
// It returns when they have ended, or after settleTime.
func (s *shims) kill(pid int, id string) {
	shim, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // it has ended
	}
	defer unix.Close(shim)
	if s.idOf(pid) != id { // the pid belongs to another process by now
		return
	}
	ends := []int{shim}
	for _, child := range childrenOf(pid) {
		// Only the shim can reap it, so the number is the child's as long as the shim is its parent.
		if fd, err := unix.PidfdOpen(child, 0); err == nil {
			defer unix.Close(fd)
			if slices.Contains(childrenOf(pid), child) {
				ends = append(ends, fd)
			}
		}
	}
	for _, fd := range slices.Backward(ends) {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) // fails if it has ended
	}
	until := time.Now().Add(settleTime)
	for _, fd := range ends {
		for wait := time.Until(until); wait > 0; wait = time.Until(until) {
			if n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(wait.Milliseconds())+1); n > 0 || err != nil && !errors.Is(err, unix.EINTR) {
				break
			}
		}
	}
}

// childrenOf returns the children of a process, of all its threads.
func childrenOf(pid int) (all []int) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid)) // the pattern is valid
	for _, file := range files {
		b, _ := os.ReadFile(file) // fails if the thread has ended
		for f := range strings.FieldsSeq(string(b)) {
			if child, err := strconv.Atoi(f); err == nil {
				all = append(all, child)
			}
		}
	}
	return all
}

// deleteState makes runc end the processes of a container, and remove its state and cgroups.
func (s *shims) deleteState(ctx context.Context, id, state string) error {
	if state == "" {
		return nil
	}
	out, err := exec.CommandContext(ctx, "runc", "--root", s.runc, "delete", "--force", id).CombinedOutput()
	if err != nil {
		return fmt.Errorf("runc delete: %w: %s", err, bytes.TrimSpace(out))
	}
	return nil
}

// removeBundle removes a bundle, with the mount and the folder on the disk that belong to it.
func removeBundle(bundle string) error {
	if bundle == "" {
		return nil
	}
	root := filepath.Join(bundle, rootFolder)
	for { // several may be mounted there
		err := unix.Unmount(root, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", root, err)
		}
	}
	parts := strings.Split(bundle, "/")
	own := filepath.Join(parts[len(parts)-3:]...) // the same for the folder on the disk
	if work, err := os.Readlink(filepath.Join(bundle, workLink)); err == nil && strings.HasSuffix(work, "/"+own) {
		if err := os.RemoveAll(work); err != nil {
			return err
		}
	}
	return os.RemoveAll(bundle)
}

// removeSocket removes the socket of a shim that has ended. A shim that was killed leaves it.
func (s *shims) removeSocket(id string) error {
	err := os.Remove(s.socketOf(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// socketOf returns the path of a shim's socket.
func (s *shims) socketOf(id string) string {
	return fmt.Sprintf("%s/%x", shimSockets, sha256.Sum256([]byte(filepath.Join(s.address, s.namespace, id))))
}

func isFolder(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.IsDir()
}
