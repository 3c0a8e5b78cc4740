// Package containerdtest starts a containerd of a test's own, with its own root, state and socket.
// A machine's containerd is never used.
package containerdtest

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"golang.org/x/sys/unix"
)

// Server is a containerd that a test may kill and start again.
type Server struct {
	Address string // of its unix socket
	Root    string // folder of its content and snapshots
	State   string // folder of its sockets and running tasks
	// Namespace is one that no other containerd of this machine has. Those that run with runc share a
	// folder, in which a container's id is unique per namespace.
	Namespace string

	t      testing.TB
	config string
	log    string

	mu  sync.Mutex
	cmd *exec.Cmd     // nil: it does not run
	end chan struct{} // closed when cmd has ended
}

// runcFolder is where containerd has runc keep its containers, by namespace.
const runcFolder = "/run/containerd/runc"

// wait bounds how long a containerd may take to answer or to end.
const wait = 2 * time.Minute

// Start starts a containerd that ends with the test. The test is skipped if it cannot run one, and
// fails instead if CI is true. STAGECOACH_CONTAINERD names the folder of containerd's programs;
// empty: PATH.
func Start(t testing.TB) *Server {
	t.Helper()
	if why := missing(); why != "" {
		if os.Getenv("CI") == "true" {
			t.Fatal(why)
		}
		t.Skip(why)
	}
	// A socket's path has at most 107 bytes, and shims have sockets below State.
	dir, err := os.MkdirTemp("", "ctr") //nolint:usetesting // as above
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{
		Address: filepath.Join(dir, "c.sock"), Root: filepath.Join(dir, "root"), State: filepath.Join(dir, "state"),
		Namespace: filepath.Base(dir), config: filepath.Join(dir, "config.toml"), log: filepath.Join(dir, "log"), t: t,
	}
	config := fmt.Sprintf(`version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.grpc.v1.cri", "io.containerd.internal.v1.opt"]
[grpc]
address = %q
`, s.Root, s.State, s.Address)
	if err := os.WriteFile(s.config, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Kill()
		if t.Failed() {
			b, _ := os.ReadFile(s.log)
			lines := strings.Split(string(b), "\n")
			t.Logf("containerd's last lines:\n%s", strings.Join(lines[max(0, len(lines)-20):], "\n"))
		}
		s.endShims()
		s.removeGroups()
		unmountBelow(dir)
		if err := os.RemoveAll(filepath.Join(runcFolder, s.Namespace)); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	s.Run()
	return s
}

// initProgram builds stagecoach-init once per test binary.
var initProgram = sync.OnceValues(func() (string, error) {
	module, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", err
	}
	// Another checkout may have another protocol.
	sum := sha256.Sum256(module)
	path := filepath.Join(os.TempDir(), fmt.Sprintf("stagecoach-init-of-tests-%x", sum[:6]))
	next := fmt.Sprintf("%s.%d", path, os.Getpid()) // other test binaries do the same
	cmd := exec.Command("go", "build", "-o", next, "github.com/stagecoach-serving/stagecoach/cmd/stagecoach-init")
	cmd.Env, cmd.Stderr = append(os.Environ(), "CGO_ENABLED=0"), os.Stderr
	if err := cmd.Run(); err != nil {
		return "", err
	}
	return path, os.Rename(next, path)
})

// Init returns the path of the program stagecoach-init.
func Init(t testing.TB) string {
	t.Helper()
	path, err := initProgram()
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// missing returns why this machine cannot run a containerd; empty: it can.
func missing() string {
	if os.Geteuid() != 0 {
		return "containerd needs root"
	}
	for _, program := range []string{"containerd", "runc"} {
		if _, err := exec.LookPath(find(program)); err != nil {
			return fmt.Sprintf("%s: %v; install containerd and runc (apt-get install containerd runc)", program, err)
		}
	}
	return ""
}

// find returns the path or name of one of containerd's programs.
func find(program string) string {
	if dir := os.Getenv("STAGECOACH_CONTAINERD"); dir != "" && program != "runc" {
		return filepath.Join(dir, program)
	}
	return program
}

// Run starts containerd, unless it runs, and waits until it answers.
func (s *Server) Run() {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd != nil {
		return
	}
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		s.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(find("containerd"), "--config", s.config)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if dir := os.Getenv("STAGECOACH_CONTAINERD"); dir != "" {
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
	}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	end := make(chan struct{})
	go func() { _ = cmd.Wait(); close(end) }() // Kill waits for it
	s.cmd, s.end = cmd, end
	ctx, cancel := context.WithTimeout(context.Background(), wait)
	defer cancel()
	if err := s.answers(ctx); err != nil {
		b, _ := os.ReadFile(s.log)
		s.t.Fatalf("containerd does not answer: %v\n%s", err, b)
	}
}

// answers waits until containerd answers.
func (s *Server) answers(ctx context.Context) error {
	for {
		c, err := containerd.New(s.Address)
		if err == nil {
			_, err = c.Version(ctx)
			err = errors.Join(err, c.Close())
		}
		if err == nil {
			return nil
		}
		select {
		case <-s.end:
			return fmt.Errorf("it has ended: %w", err)
		case <-ctx.Done():
			return err
		case <-time.After(10 * time.Millisecond): // its socket appears at some time
		}
	}
}

// Kill kills containerd with SIGKILL, if it runs, and waits for its end. Its containers run on.
func (s *Server) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill() // fails if it has ended
	<-s.end
	s.cmd = nil
}

// Signal signals containerd. A stopped one takes connections and does not answer.
func (s *Server) Signal(sig syscall.Signal) {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.cmd.Process.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
}

// Client returns a client for a namespace. It is closed when the test ends.
func (s *Server) Client(namespace string) *containerd.Client {
	s.t.Helper()
	c, err := containerd.New(s.Address, containerd.WithDefaultNamespace(namespace))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = c.Close() })
	return c
}

// Shims returns the pids of the shims of this containerd.
func (s *Server) Shims() []int {
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		s.t.Fatal(err)
	}
	var pids []int
	for _, file := range all {
		b, err := os.ReadFile(file) // fails if the process has ended
		if err != nil || !strings.Contains(string(b), "containerd-shim") || !strings.Contains(string(b), s.Address) {
			continue
		}
		var pid int
		if _, err := fmt.Sscanf(file, "/proc/%d/cmdline", &pid); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// Folders returns the folders that this containerd and its runc have of containers. It leaves out
// those whose names begin with a dot: a containerd that is killed while it removes such a folder
// leaves it, and so does the next one.
func (s *Server) Folders() (all []string) {
	s.t.Helper()
	for _, pattern := range []string{
		filepath.Join(s.State, "io.containerd.runtime.*", s.Namespace, "[^.]*"), filepath.Join(s.Root, "io.containerd.runtime.*", s.Namespace, "[^.]*"),
		filepath.Join(runcFolder, s.Namespace, "*"),
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			s.t.Fatal(err)
		}
		all = append(all, found...)
	}
	return all
}

// endShims kills the shims that a test has left, with the processes of their containers.
func (s *Server) endShims() {
	for _, shim := range s.Shims() {
		for _, pid := range children(shim) {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
		_ = unix.Kill(shim, unix.SIGKILL)
	}
}

// removeGroups removes the cgroups of containers that a test has left. runc, which would do so, has
// been killed.
func (s *Server) removeGroups() {
	left, _ := os.ReadDir(filepath.Join(runcFolder, s.Namespace)) // there are none
	for _, c := range left {
		groups, err := filepath.Glob("/sys/fs/cgroup/*/stagecoach." + c.Name())
		if err != nil {
			s.t.Error(err)
		}
		for _, g := range groups {
			until := time.Now().Add(wait)
			for err := os.Remove(g); errors.Is(err, unix.EBUSY) && time.Now().Before(until); err = os.Remove(g) {
				time.Sleep(10 * time.Millisecond) // no event says that its killed processes have ended
			}
		}
	}
}

func children(of int) []int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", of, of))
	if err != nil {
		return nil
	}
	var out []int
	for field := range strings.FieldsSeq(string(b)) {
		var pid int
		if _, err := fmt.Sscan(field, &pid); err == nil {
			out = append(out, pid)
		}
	}
	return out
}

// unmountBelow unmounts what is mounted below a folder, the innermost first.
func unmountBelow(dir string) {
	b, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return
	}
	lines := strings.Split(string(b), "\n")
	for i := len(lines) - 1; i >= 0; i-- {
		if fields := strings.Fields(lines[i]); len(fields) > 1 && strings.HasPrefix(fields[1], dir+"/") {
			_ = unix.Unmount(fields[1], unix.MNT_DETACH)
		}
	}
}
