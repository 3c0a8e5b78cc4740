package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/container"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// TestCanceledStartsLeaveNothing ends starts at many points of their way. A start that its context
// ends leaves no process, container, folder, mount or cgroup.
func TestCanceledStartsLeaveNothing(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		root := image(t)
		mark := fmt.Sprintf("canceled-%s-%d", r.name, os.Getpid())
		for name, c := range map[string]sandbox.Command{"account": r.beside(root, "wait", mark), "root": inside(root, "wait", mark)} {
			c.Labels = map[string]string{sandbox.LabelFunction: mark}
			begin := time.Now()
			kill(r.start(t, c))
			took := time.Since(begin)
			const points = 24
			why, ended := errors.New("nobody waits for it"), 0
			for i := range points {
				ctx, cancel := context.WithTimeoutCause(t.Context(), took*time.Duration(i)/points, why)
				p, err := r.tryWithin(ctx, t, c)
				cancel()
				switch {
				case err == nil: // it does not end with its context
					p.awaitLine(t)
					_ = p.Signal(unix.SIGTERM)
					if status := p.end(); status != 0 {
						t.Errorf("%s: %#x, want that its handler ends it", name, status)
					}
				case errors.Is(err, why):
					ended++
				default:
					t.Errorf("%s: %v, want that nobody waits", name, err)
				}
			}
			if ended == 0 {
				t.Errorf("%s: no start of %d was ended", name, points)
			}
			t.Logf("%s: %d starts of %d were ended", name, ended, points)
		}
		var have []string
		defer func() {
			if t.Failed() {
				t.Log("left:", have)
			}
		}()
		proctest.Until(t, "nothing is left", func() bool {
			have = leftOf(t, mark)
			if r.ctr == nil {
				return len(have) == 0
			}
			all, err := r.ctr.Client(r.ctr.Namespace).Containers(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range all {
				have = append(have, "container "+c.ID())
			}
			for _, pid := range r.ctr.Shims() {
				have = append(have, fmt.Sprint("shim ", pid))
			}
			return len(have) == 0
		})
		kill(r.start(t, r.beside(root, "wait"))) // it still starts processes
	})
}

func kill(p running) {
	_ = p.Signal(unix.SIGKILL) // it may have ended
	p.end()
}

// leftOf names the processes, folders, mounts and cgroups whose names have a part.
func leftOf(t *testing.T, part string) (have []string) {
	t.Helper()
	lines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range lines {
		if b, _ := os.ReadFile(file); strings.Contains(string(b), part) { // it may have ended
			have = append(have, filepath.Dir(file))
		}
	}
	for _, pattern := range []string{container.Folders + "/" + part + "*", "/sys/fs/cgroup/*/stagecoach." + part + "*", "/sys/fs/cgroup/stagecoach." + part + "*"} {
		found, bad := filepath.Glob(pattern)
		have, err = append(have, found...), errors.Join(err, bad)
	}
	mounts, bad := os.ReadFile("/proc/self/mounts")
	if err = errors.Join(err, bad); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), container.Folders+"/"+part) {
		have = append(have, "mounts")
	}
	return have
}

// TestEndedContextsStartNothing gives a Runtime contexts that have ended, and ends one after its
// start.
func TestEndedContextsStartNothing(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		root := image(t)
		for _, c := range []sandbox.Command{r.beside(root, "wait"), inside(root, "wait")} {
			ctx, cancel := context.WithCancel(t.Context())
			p, err := r.tryWithin(ctx, t, c)
			if err != nil {
				t.Fatal(err)
			}
			cancel()
			p.awaitLine(t) // it runs on
			if err := p.Signal(unix.SIGTERM); err != nil {
				t.Error(err)
			}
			if status := p.end(); status != 0 {
				t.Errorf("%#x, want that its handler ends it", status)
			}
			if _, err := r.tryWithin(ctx, t, c); !errors.Is(err, context.Canceled) {
				t.Errorf("%v, want that the context has ended", err)
			}
		}
	})
}

// TestOperatorsLimitsHold has an operator whose hard limits are lower than those of functions, and
// limits that functions have none of.
func TestOperatorsLimitsHold(t *testing.T) {
	const lowered = "LIMITS_ARE_LOWERED"
	if os.Getenv(lowered) == "" { // this process could not raise them again
		cmd := exec.CommandContext(t.Context(), "prlimit", "--nofile=4000:5000", "--memlock=1048576:2097152", "--sigpending=900:1000",
			os.Args[0], "-test.v", "-test.run", "^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), lowered+"=1")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	each(t, func(t *testing.T, r rig) {
		c := r.beside(image(t))
		c.Argv = []string{"cat", "/proc/self/limits"}
		text := strings.Join(strings.Fields(r.said(t, c)), " ")
		want(t, text, "Max open files 5000 5000 files", "Max locked memory 2097152 2097152 bytes", "Max pending signals 900 1000 signals", "Max core file size 0 0 bytes")
	})
}

// TestHostileTimeZonesDoNotHoldStarts gives a root a named pipe as its time zone. Nobody writes to
// it.
func TestHostileTimeZonesDoNotHoldStarts(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		root := image(t)
		if err := unix.Mkfifo(filepath.Join(root, "etc/localtime"), 0o644); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		p, err := r.tryWithin(ctx, t, inside(root, "id"))
		if err != nil {
			t.Fatal(err)
		}
		if status := p.end(); status != 0 {
			t.Errorf("it ended with %#x, want 0", status)
		}
	})
}
