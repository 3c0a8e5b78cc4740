package container

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// TestCloseEndsStartsOfAStoppedContainerd has more starts wait than containerd works on at once.
func TestCloseEndsStartsOfAStoppedContainerd(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	s.Signal(unix.SIGSTOP)
	n := 2 * cap(r.starting)
	errs := make(chan error, n)
	for range n {
		go func() { // the test waits for it
			_, err := r.Start(t.Context(), sleeper())
			errs <- err
		}()
	}
	proctest.Until(t, "containerd has as many starts as it may have", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return len(r.starting) == cap(r.starting) && len(r.live) == cap(r.starting)
	})
	closed := make(chan struct{})
	go func() { defer close(closed); r.Close() }() // the test waits for it
	for range n {
		if err := <-errs; !errors.Is(err, sandbox.ErrClosed) {
			t.Errorf("%v, want that the Runtime is closed", err)
		}
	}
	s.Signal(unix.SIGCONT)
	<-closed
	nothingLeft(t, s)
}

// TestCloseWaitsForStarts closes a Runtime while a container is made, by a start that cannot be
// ended at this point.
func TestCloseWaitsForStarts(t *testing.T) {
	s := containerdtest.Start(t)
	cfg := config(t, s)
	cfg.Devices = []string{"example.com/none=*"}
	r, err := openConfig(cfg)
	if err != nil {
		t.Fatal(err)
	}
	registry.Lock()
	c := sleeper()
	c.Options.Devices = []string{"example.com/none=one"}
	started, closed := make(chan error, 1), make(chan struct{})
	go func() { // the test waits for it
		_, err := r.Start(t.Context(), c)
		started <- err
	}()
	proctest.Until(t, "a folder is made", func() bool { return len(left(t, s)) > 0 })
	go func() { defer close(closed); r.Close() }() // the test waits for it
	<-r.open.Done()
	for range 20 { // a Close that does not wait has enough time
		if have := left(t, s); len(have) == 0 {
			t.Error("the folder is removed during the start")
			break
		}
	}
	registry.Unlock()
	if err := <-started; !errors.Is(err, sandbox.ErrClosed) {
		t.Errorf("%v, want that the Runtime is closed", err)
	}
	<-closed
	nothingLeft(t, s)
}

// TestFailedRemovalsAreTriedAgain has removals fail, as they do while containerd is away for long.
func TestFailedRemovalsAreTriedAgain(t *testing.T) {
	s := containerdtest.Start(t)
	for name, again := range map[string]func(r *Runtime){
		"sweep": func(r *Runtime) { r.Sweep(t.Context()) },
		"start": func(r *Runtime) { start(t, r, sleeper()) },
		"close": func(*Runtime) {},
	} {
		t.Run(name, func(t *testing.T) {
			r := open(t, s)
			p := start(t, r, sleeper())
			var giveUp context.CancelFunc
			was := r.remove
			r.remove, giveUp = context.WithCancel(was)
			giveUp()
			p.Forget()
			proctest.Until(t, "its removal fails", func() bool {
				r.mu.Lock()
				defer r.mu.Unlock()
				return len(r.failed) == 1
			})
			r.remove = was
			if have := left(t, s); len(have) == 0 {
				t.Error("nothing is left, want the container")
			}
			again(r)
			if name != "close" {
				proctest.Until(t, "its folder is removed", func() bool {
					_, err := os.Stat(p.folder.path)
					return errors.Is(err, os.ErrNotExist)
				})
			}
			r.Close()
			nothingLeft(t, s, p.id)
		})
	}
}

// TestStartsFollowContainerdsReturn starts a container as soon as containerd is back, however long
// a removal has tried to reach it.
func TestStartsFollowContainerdsReturn(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	defer r.Close()
	p := start(t, r, sleeper())
	s.Kill()
	end(t, p)
	p.Forget()
	if _, err := r.Start(t.Context(), sleeper()); err == nil || !strings.Contains(err.Error(), "in a container: containerd: ") {
		t.Errorf("a start without containerd: %v", err)
	}
	s.Run()
	start(t, r, sleeper())
}

// end kills the program of a process, and waits for its end.
func end(t *testing.T, p *process) {
	t.Helper()
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	p.Wait()
}

// TestProgramIsEndedForMemoryAsItsRuntimeIs checks that the value does not come from containerd.
func TestProgramIsEndedForMemoryAsItsRuntimeIs(t *testing.T) {
	const file = "/proc/self/oom_score_adj"
	s := containerdtest.Start(t)
	was, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, []byte("321"), 0); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.WriteFile(file, was, 0) }()
	r := open(t, s)
	defer r.Close()
	p := start(t, r, sleeper())
	if b, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID()) + "/oom_score_adj"); err != nil || strings.TrimSpace(string(b)) != "321" {
		t.Errorf("%q, %v, want 321", b, err)
	}
}

// TestFoldersWithoutAnOwnerAreRemoved has a folder whose maker was killed, and one that is made
// now.
func TestFoldersWithoutAnOwnerAreRemoved(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	defer r.Close()
	if err := os.MkdirAll(Folders, 0o700); err != nil {
		t.Fatal(err)
	}
	old, now := filepath.Join(Folders, s.Namespace+"-old"), filepath.Join(Folders, s.Namespace+"-new")
	long := time.Now().Add(-2 * ownerless)
	if err := errors.Join(os.Mkdir(old, 0o700), os.Mkdir(now, 0o700), os.Chtimes(old, long, long)); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(now)
	r.Sweep(t.Context())
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old one: %v, want none", err)
	}
	if _, err := os.Stat(now); err != nil {
		t.Errorf("the new one: %v", err)
	}
}

// TestOwnersOfAnotherBootDoNotLive checks that a process with the same number and time does not
// keep what was left before the machine's start.
func TestOwnersOfAnotherBootDoNotLive(t *testing.T) {
	own := ownName()
	if !lives(own) {
		t.Errorf("%s does not live", own)
	}
	if before := strings.Replace(own, boot(), "before", 1); lives(before) {
		t.Errorf("%s lives", before)
	}
}

// TestCopiedFilesAreInMemory checks where copies of secrets are.
func TestCopiedFilesAreInMemory(t *testing.T) {
	s := containerdtest.Start(t)
	rootFor(t)
	r := open(t, s)
	c := rooted()
	from := t.TempDir()
	if err := os.WriteFile(filepath.Join(from, "token"), []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	c.Binds = append(c.Binds, sandbox.Bind{From: from, To: "/secrets", Copy: true})
	p := start(t, r, c)
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil || !strings.Contains(string(mounts), "tmpfs "+filepath.Join(p.folder.path, memoryFolder)+" ") {
		t.Errorf("%v, want a file system in memory in %s:\n%s", err, p.folder.path, mounts)
	}
	if b, err := os.ReadFile("/proc/" + strconv.Itoa(p.PID()) + "/root/secrets/token"); err != nil || string(b) != "secret" {
		t.Errorf("%q, %v, want the secret", b, err)
	}
	r.Close()
	nothingLeft(t, s, p.id)
}
