package zygote

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/keysmanager/warden"
)

// leftGroups are the cgroups that an earlier daemon has left.
type leftGroups map[string]bool

func (g leftGroups) Create(string, string, resources.Limits) (resources.Group, error) {
	return nil, errors.ErrUnsupported
}

func (g leftGroups) Adopt(name string) (resources.Group, error) {
	if !g[name] {
		return nil, fs.ErrNotExist
	}
	return leftGroup{}, nil
}

func (g leftGroups) Retain([]string) error { return nil }

type leftGroup struct{ resources.Group }

func (leftGroup) Remove() error { return nil }

func (leftGroup) Usage() (resources.GroupUsage, error) { return resources.GroupUsage{}, nil }

// TestAdoptedZygoteKeepsItsGroups adopts zygotes of this release, whose groups are in a family, and
// of an earlier one, which made groups side by side. New children get groups where those are.
func TestAdoptedZygoteKeepsItsGroups(t *testing.T) {
	for name, tc := range map[string]struct{ recorded, group, children string }{
		"this release":       {"zygote-a/zygote-a", "zygote-a/zygote-a", "zygote-a"},
		"an earlier release": {"", "zygote-a", "."},
		"no group is left":   {"zygote-b/zygote-b", "", "."},
	} {
		t.Run(name, func(t *testing.T) {
			w := warden.InProcess(sandbox.NewSpawner())
			defer w.Close()
			pool := resources.NewPool(resources.Config{Warden: w, Groups: leftGroups{"zygote-a/zygote-a": true, "zygote-a": true}, Log: slog.New(slog.DiscardHandler)})
			h := &Host{Warden: w, Pool: pool, Exits: new(resources.Ends), Context: t.Context(), Detached: make(chan struct{}), Log: slog.New(slog.DiscardHandler)}
			ours, theirs, err := pair(unix.SOCK_SEQPACKET)
			if err != nil {
				t.Fatal(err)
			}
			defer theirs.Close()
			output, _, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			errors, _, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			z, err := Adopt(h, warden.Kept{Name: "zygote-a", PID: os.Getpid(), Files: []*os.File{ours, output, errors}}, pool.New(), Description{Cgroups: Cgroups{Group: tc.recorded}, Loaded: time.Now()})
			if err != nil {
				t.Fatal(err)
			}
			defer z.control.conn.Close()
			defer z.output.Abandon()
			if got := z.Describe().Group; got != tc.group {
				t.Errorf("group %q, want %q", got, tc.group)
			}
			if got := childGroup(z.held.Group().ID()); path.Dir(got) != tc.children || !strings.HasPrefix(path.Base(got), "child-") {
				t.Errorf("a child's group is %q, want one in %q", got, tc.children)
			}
		})
	}
}
