package sandbox

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestProcessesHaveANameAndAHome checks processes with a root of their own. The image's /etc/passwd
// and /etc/group name its users. A user that is missing there is added. Each user has a home that
// it can write to.
func TestProcessesHaveANameAndAHome(t *testing.T) {
	const lists = "root:x:0:0:root:/root:/bin/sh\napp:x:100:101:App:/home/app:/bin/sh\nnobody:x:65534:65534::/:/bin/sh\nweb:x:33:33::/var/www:/bin/sh"
	userVariables := map[string]struct {
		user, env   string
		readOnly    bool
		home, name  string
		added, team string // lines that the lists lack
	}{
		"listed, with a home that is made":      {user: "app", home: "/home/app", name: "app"},
		"listed, with a home that is another's": {user: "nobody", home: "/tmp", name: "nobody"},
		"listed, with a home of root's":         {user: "web", home: "/tmp", name: "web"},
		"unlisted":                              {user: "7", home: "/tmp", name: "user-7", added: "user-7:x:7:0::/tmp:/bin/sh"},
		"unlisted, with a group":                {user: "7:8", home: "/tmp", name: "user-7", added: "user-7:x:7:8::/tmp:/bin/sh", team: "user-8:x:8:"},
		"a root that is closed":                 {user: "7", readOnly: true, home: "/tmp", name: "user-7", added: "user-7:x:7:0::/tmp:/bin/sh"},
		"a closed root without the home":        {user: "app", readOnly: true, home: "/tmp", name: "app"},
		"an environment of its own":             {user: "7", env: "/dev/shm", home: "/dev/shm", name: "me", added: "user-7:x:7:0::/tmp:/bin/sh"},
	}
	s := newSpawner(t)
	for name, tc := range userVariables {
		t.Run(name, func(t *testing.T) {
			dir := root(t)
			write(t, filepath.Join(dir, "etc/passwd"), lists)
			write(t, filepath.Join(dir, "var/www/index.html"), "x")
			c := Command{Chroot: dir, User: tc.user, ReadOnly: tc.readOnly}
			c.Argv = []string{"/probe", "env", "write=" + tc.home + "/mine", "read=/etc/passwd", "read=/etc/group"}
			if tc.env != "" {
				c.Env = map[string]string{"HOME": tc.env, "USER": "me", "LOGNAME": "me"}
			}
			got := finished(t, s, c)
			text := strings.Join(got, "\n")
			for variable, want := range map[string]string{" HOME=": tc.home, " LOGNAME=": tc.name, " USER=": tc.name} {
				if !strings.Contains(text, variable+want) || strings.Count(text, variable) != 1 {
					t.Errorf("want%s%s alone:\n%s", variable, want, text)
				}
			}
			if strings.Contains(text, "write=") {
				t.Errorf("its home is not usable:\n%s", text)
			}
			for _, line := range []string{tc.added, tc.team} {
				if line != "" && !slices.Contains(got, "stdout: "+line) {
					t.Errorf("no line %q:\n%s", line, text)
				}
			}
			if tc.added == "" && strings.Contains(text, "user-") {
				t.Errorf("a listed user is added again:\n%s", text)
			}
		})
	}
}

// TestAccountsHaveANameAndAHome checks processes that see the machine's files. A real program asks
// for the user's name and home. The machine's own lists of users must stay unchanged.
func TestAccountsHaveANameAndAHome(t *testing.T) {
	a := openAccounts(t)
	l := take(t, a, "ns")
	before, err := os.ReadFile(passwdFile)
	if err != nil {
		t.Fatal(err)
	}
	const script = `id -un; id -gn; echo "$USER $LOGNAME $HOME"; touch "$HOME/x" && ls "$HOME"; echo >/etc/passwd || wc -l </etc/passwd`
	got := finished(t, newSpawner(t), Command{Dir: "/usr", Argv: []string{"/bin/sh", "-c", script}, As: &l.Account})
	name, team := userName(l.UID), userName(l.GID)
	want := []string{name, team, fmt.Sprintf("%s %s /tmp", name, name), "x", fmt.Sprint(strings.Count(string(before), "\n") + 1)}
	for _, w := range want {
		if !slices.Contains(got, "stdout: "+w) {
			t.Errorf("no %q:\n%s", w, strings.Join(got, "\n"))
		}
	}
	if !slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, "Read-only file system") }) {
		t.Errorf("it can change the list:\n%s", strings.Join(got, "\n"))
	}
	if after, err := os.ReadFile(passwdFile); err != nil || string(after) != string(before) {
		t.Errorf("the machine's list has changed, %v:\n%s", err, after)
	}
}

// TestNamesAreReadableWhateverTheUmask starts a process from a parent whose new files only their
// owner can read.
func TestNamesAreReadableWhateverTheUmask(t *testing.T) {
	a := openAccounts(t)
	l := take(t, a, "ns")
	before := unix.Umask(0o077)
	defer unix.Umask(before)
	got := finished(t, newSpawner(t), Command{Dir: "/usr", Argv: []string{"/usr/bin/id", "-un"}, As: &l.Account})
	if want := "stdout: " + userName(l.UID); len(got) != 1 || got[0] != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestTheHomeOfTheStartingUserIsClosed checks a process that runs as this user. Other users cannot
// put files into its home, and a folder that belongs to somebody else is not used.
func TestTheHomeOfTheStartingUserIsClosed(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	s := newSpawner(t)
	got := finished(t, s, Command{Dir: "/", Argv: []string{"/bin/sh", "-c", `stat -c %a "$HOME"; touch "$HOME/x" && id -un && echo "$USER"`}})
	if want := []string{"stdout: 700", "stdout: " + starterName(), "stdout: " + starterName()}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
	home := filepath.Join(os.TempDir(), fmt.Sprintf("stagecoach-home-%d", os.Geteuid()))
	if err := errors.Join(os.RemoveAll(home), os.Symlink("/", home)); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Start(t.Context(), Command{Dir: "/", Argv: []string{"/bin/true"}}); err == nil || !strings.Contains(err.Error(), home) {
		t.Errorf("%v, want an error that names %s", err, home)
	}
}

// TestPythonKnowsItsUser asks for the user as PyTorch does.
func TestPythonKnowsItsUser(t *testing.T) {
	python := proctest.Python(t)
	a := openAccounts(t)
	l := take(t, a, "ns")
	const code = "import getpass, os, pwd; print(getpass.getuser(), pwd.getpwuid(os.getuid()).pw_name, os.path.expanduser('~'))"
	for _, unset := range []string{"", "env -u USER -u LOGNAME -u HOME "} {
		argv := append(strings.Fields(unset), python, "-c", code)
		got := finished(t, newSpawner(t), Command{Dir: "/usr", Argv: argv, As: &l.Account})
		if want := fmt.Sprintf("stdout: %[1]s %[1]s /tmp", userName(l.UID)); len(got) != 1 || got[0] != want {
			t.Errorf("%sgot %q, want %q", unset, got, want)
		}
	}
}
