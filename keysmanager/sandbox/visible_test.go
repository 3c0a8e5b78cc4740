package sandbox

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestProgramsThatAnAccountDoesNotSee puts an interpreter in each place that is hidden from the
// process. Each start fails with an error that names the file, the reason and the remedy.
func TestProgramsThatAnAccountDoesNotSee(t *testing.T) {
	a := openAccounts(t)
	l := take(t, a, "ns")
	open, tmp := proctest.Outside(t), t.TempDir() // below /tmp
	if !strings.HasPrefix(tmp, "/tmp/") {
		t.Skipf("TMPDIR: %s, want it below /tmp", tmp)
	}
	closed := filepath.Join(open, "home")
	echo, err := os.ReadFile("/bin/echo")
	if err != nil {
		t.Fatal(err)
	}
	for _, program := range []string{open + "/opt/bin/python", tmp + "/venv/bin/python", closed + "/me/venv/bin/python", open + "/copied/bin/python"} {
		write(t, program, string(echo))
	}
	image := filepath.Join(tmp, "images", "f", "1")
	write(t, filepath.Join(image, "own"), string(echo))
	write(t, filepath.Join(image, "script"), "#!"+tmp+"/venv/bin/python\n")
	write(t, filepath.Join(image, "env"), "#!/usr/bin/env python\n")
	write(t, filepath.Join(open, "copied/pyvenv.cfg"), "include-system-site-packages = false\nhome = "+closed+"/me/venv/bin\n")
	write(t, filepath.Join(open, "unreadable"), string(echo))
	if err := errors.Join(
		os.Chmod(closed, 0o700), os.Chmod(filepath.Join(open, "unreadable"), 0o700),
		os.MkdirAll(filepath.Join(open, "venv/bin"), 0o755),
		os.Symlink("python3", filepath.Join(open, "venv/bin/python")),
		os.Symlink(closed+"/me/venv/bin/python", filepath.Join(open, "venv/bin/python3")),
		os.Symlink("../opt", filepath.Join(open, "venv/relative")),
		os.Symlink("../../../../tmp/"+filepath.Base(filepath.Dir(tmp))+"/001", filepath.Join(open, "venv/away")),
	); err != nil {
		t.Fatal(err)
	}
	s := newSpawner(t)
	for _, tc := range []struct{ process, path, want string }{
		{tmp + "/venv/bin/python", "", "functions have an empty /tmp of their own"},
		{closed + "/me/venv/bin/python", "", "users of their own, who cannot enter " + closed + " (drwx------)"},
		{open + "/venv/bin/python", "", open + "/venv/bin/python leads to " + closed + "/me"},
		{open + "/venv/away/venv/bin/python", "", "functions have an empty /tmp"},
		{open + "/unreadable", "", "cannot run " + open + "/unreadable (-rwx------)"},
		{open + "/copied/bin/python", "", "the virtual environment of " + open + "/copied/bin/python"},
		{"./script", "", "the first line of " + image + "/script: " + tmp + "/venv/bin/python"},
		{"./env", tmp + "/venv/bin:/usr/bin", "the first line of " + image + "/env: " + tmp + "/venv/bin/python"},
		{"python", tmp + "/venv/bin:/usr/bin", tmp + "/venv/bin/python"},
	} {
		c := Command{Dir: image, Process: tc.process + " said", As: &l.Account}
		if tc.path != "" {
			c.Env = map[string]string{"PATH": tc.path}
		}
		_, err := s.Start(t.Context(), c)
		if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), "such as /opt") {
			t.Errorf("%s: %v, want an error with %q and what to do", tc.process, err, tc.want)
		}
		if told := c.Visible(); told == nil || !strings.HasSuffix(err.Error(), told.Error()) {
			t.Errorf("%s: before a start %v, at the start %v, want the same", tc.process, told, err)
		}
	}
	for _, process := range []string{open + "/opt/bin/python", open + "/venv/relative/bin/python", "./own", "echo"} {
		c := Command{Dir: image, Process: process + " said", As: &l.Account}
		if got := finished(t, s, c); len(got) != 1 || got[0] != "stdout: said" {
			t.Errorf("%s: %q, want it to run", process, got)
		}
		c.As = &Others
		if err := c.Visible(); err != nil {
			t.Errorf("%s: %v, want every account to see it", process, err)
		}
	}
	for _, process := range []string{"/no/such/python", "no-such-python"} {
		if err := (Command{Dir: image, Process: process, As: &l.Account}).Visible(); err != nil {
			t.Errorf("%s: %v, want no error for a program that may be added later", process, err)
		}
	}
	if left := proctest.Children(t, os.Getpid()); len(left) > 0 {
		t.Errorf("processes %v are left", left)
	}
}

// TestVisibleOpensNoPipe checks that Visible does not wait for a pipe that a deploy names as its
// program.
func TestVisibleOpensNoPipe(t *testing.T) {
	t.Parallel()
	dir := proctest.Outside(t)
	write(t, filepath.Join(dir, "venv/bin/python"), "")
	write(t, filepath.Join(dir, "script"), "#!"+dir+"/pipe\n")
	for _, pipe := range []string{dir + "/pipe", dir + "/venv/pyvenv.cfg"} {
		if err := unix.Mkfifo(pipe, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	done := make(chan error, 1)
	go func() {
		var errs []error
		for _, process := range []string{dir + "/pipe", dir + "/script", dir + "/venv/bin/python"} {
			errs = append(errs, Command{Dir: dir, Process: process, As: &Others}.Visible())
		}
		done <- errors.Join(errs...)
	}()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("it waits for a writer of the pipe")
	}
}
