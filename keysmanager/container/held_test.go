package container

import (
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// hold starts a command that waits, and returns its holder.
func hold(t *testing.T, r *Runtime, c sandbox.Command) (*process, sandbox.Holder) {
	t.Helper()
	h, its, err := sandbox.NewHolder()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	c.Held, c.Files = true, append(c.Files, its)
	p := start(t, r, c)
	if err := its.Close(); err != nil {
		t.Fatal(err)
	}
	if err := h.Ready(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	return p, h
}

// looks prints what a program finds: its variables, user, descriptors, limits, rights and mounts.
const looks = `env | sort; id; ls /proc/self/fd; ulimit -n -u -c; grep -E '^(Cap|NoNew|Seccomp|Sig[PBIC]|Groups)' /proc/self/status; cut -d' ' -f2 /proc/mounts | sort; pwd; tty; exit 7`

// TestHeldProcessBecomesItsProgram compares a program that has waited with one that has not: they
// find the same, and end in the same way.
func TestHeldProcessBecomesItsProgram(t *testing.T) {
	rootFor(t)
	r := open(t, containerdtest.Start(t))
	defer r.Close()
	for name, c := range map[string]sandbox.Command{"account": sleeper(), "root": rooted()} {
		c.Argv = []string{"sh", "-c", looks}
		c.Env = map[string]string{"PASSWORD": "of nobody else", "LATE": "not yet", "GOMAXPROCS": "7"}
		printed := func(held bool) string {
			t.Helper()
			out, in, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer out.Close()
			c := c
			c.Stdout, c.Stderr = in, in
			var p *process
			if held {
				var h sandbox.Holder
				p, h = hold(t, r, c)
				if err := out.SetReadDeadline(time.Now()); err != nil {
					t.Fatal(err)
				}
				if n, err := out.Read(make([]byte, 1)); n > 0 || !os.IsTimeout(err) {
					t.Errorf("%s: %d bytes, %v, before the program may run", name, n, err)
				}
				if err := out.SetReadDeadline(time.Time{}); err != nil {
					t.Fatal(err)
				}
				if err := h.Go(map[string]string{"LATE": "now"}, time.Now().Add(time.Minute)); err != nil {
					t.Fatal(err)
				}
			} else {
				c.Env["LATE"] = "now"
				p = start(t, r, c)
			}
			if err := in.Close(); err != nil {
				t.Fatal(err)
			}
			text, err := io.ReadAll(out)
			if err != nil {
				t.Fatal(err)
			}
			if s := p.Wait(); s.ExitStatus() != 7 {
				t.Errorf("%s, held %v: %+v, want exit status 7", name, held, s)
			}
			p.Forget()
			return string(text)
		}
		held := printed(true)
		if want := printed(false); held != want || !strings.Contains(held, "LATE=now\n") {
			t.Errorf("%s: a program that has waited finds\n%s\nwant\n%s", name, held, want)
		}
	}
}

// TestHeldProcessEndsWithItsHolder closes the holder of a process that waits, and kills another one
// that waits.
func TestHeldProcessEndsWithItsHolder(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	c := sleeper()
	c.Argv = []string{"sh", "-c", "sleep 0; exit 9"}
	p, h := hold(t, r, c)
	h.Close()
	if status := p.Wait(); status.ExitStatus() != 0 {
		t.Errorf("%+v, want exit status 0", status)
	}
	p.Forget()
	p, h = hold(t, r, c)
	spec, err := p.container.Spec(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if all := strings.Join(append(spec.Process.Env, spec.Process.Args...), " "); strings.Contains(all, "PASSWORD") || strings.Contains(all, "sleep") {
		t.Errorf("containerd has %s", all)
	}
	if err := p.Signal(unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if status := p.Wait(); status.Signal() != unix.SIGKILL {
		t.Errorf("%+v, want SIGKILL", status)
	}
	if err := h.Go(nil, time.Now().Add(time.Minute)); err == nil {
		t.Error("a process that has been killed runs its program")
	}
	p.Forget()
	c.Argv = []string{"/usr/no-such-program"}
	p, h = hold(t, r, c)
	if err := h.Go(nil, time.Now().Add(time.Minute)); err == nil || !strings.Contains(err.Error(), "/usr/no-such-program: no such file or directory") {
		t.Errorf("%v, want what is missing", err)
	}
	p.Wait()
	p.Forget()
	r.Close()
	proctest.Until(t, "nothing is left", func() bool { return len(left(t, s)) == 0 })
}

// TestOnlyContainersAreHeld checks that a Spawner refuses a process that would wait.
func TestOnlyContainersAreHeld(t *testing.T) {
	t.Parallel()
	s := sandbox.NewSpawner()
	defer s.Close()
	if _, err := s.Start(t.Context(), sandbox.Command{Dir: "/", Argv: []string{"true"}, Purpose: sandbox.Purpose{Held: true}}); err == nil || !strings.Contains(err.Error(), "--runtime containerd") {
		t.Errorf("%v, want a refusal", err)
	}
}
