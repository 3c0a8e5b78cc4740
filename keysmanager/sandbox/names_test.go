package sandbox

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestNamesOfAProcess checks /etc/hosts and /etc/resolv.conf: each is the machine's file unless the
// Command names another file. No process can write to the other file.
func TestNamesOfAProcess(t *testing.T) {
	a, s := openAccounts(t), newSpawner(t)
	image, _ := private(t)
	given := filepath.Join(proctest.Outside(t), "closed")
	hosts, resolv := filepath.Join(given, "hosts"), filepath.Join(given, "resolv")
	write(t, hosts, "127.0.0.1 given")
	write(t, resolv, "nameserver 192.0.2.1")
	if err := os.Chmod(given, 0o700); err != nil {
		t.Fatal(err)
	}
	machines := func(path string) []string {
		t.Helper()
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return strings.Split("read="+path+": "+strings.TrimSpace(string(b)), "\n")
	}
	theirs := []string{"read=/etc/hosts: 127.0.0.1 given", "read=/etc/resolv.conf: nameserver 192.0.2.1"}
	for kind, c := range map[string]Command{
		"account": {Dir: image, As: &take(t, a, "a").Account},
		"root":    {Chroot: root(t), Dir: "/"},
	} {
		for name, tc := range map[string]struct {
			hosts, resolv string
			want          []string
		}{
			"machine's": {"", "", append(machines("/etc/hosts"), machines("/etc/resolv.conf")...)},
			"hosts":     {hosts, "", append(machines("/etc/resolv.conf"), theirs[0])},
			"both":      {hosts, resolv, theirs},
		} {
			t.Run(kind+", "+name, func(t *testing.T) {
				c := c
				c.Hosts, c.Resolv = tc.hosts, tc.resolv
				program := "./stage"
				if c.Chroot != "" {
					program = "/probe"
				}
				c.Argv = []string{program, "read=/etc/hosts", "read=/etc/resolv.conf"}
				var want []string
				for _, line := range tc.want {
					want = append(want, "stdout: "+line)
				}
				slices.Sort(want)
				if got := finished(t, s, c); !slices.Equal(got, want) {
					t.Errorf("it reads %q, want %q", got, want)
				}
				if c.Hosts == "" {
					return
				}
				c.Argv = []string{program, "write=/etc/hosts"}
				if got := finished(t, s, c); len(got) != 1 || !strings.Contains(got[0], "read-only file system") {
					t.Errorf("it writes to /etc/hosts: %q", got)
				}
				c.Hosts += "-missing"
				if _, err := s.Start(t.Context(), c); err == nil || !strings.Contains(err.Error(), "/etc/hosts") {
					t.Errorf("with a file that is missing: %v, want an error that names /etc/hosts", err)
				}
			})
		}
	}
	if b, err := os.ReadFile("/etc/hosts"); err != nil || strings.Contains(string(b), "given") {
		t.Errorf("the machine's /etc/hosts: %s, %v", b, err)
	}
}
