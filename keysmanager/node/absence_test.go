package node

import (
	"encoding/json"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"
)

// TestRefusalWaitsForTheLease checks that a control plane that may not act does not refuse a node.
// It refuses the node once, as soon as it may act.
func TestRefusalWaitsForTheLease(t *testing.T) {
	refused := 0
	var holds atomic.Bool
	d := hearing(t, func(c *DirectoryConfig) {
		c.Own = "n"
		c.Epoch = func() (uint64, error) {
			if !holds.Load() {
				return 0, errors.New("the lease is not held")
			}
			return 7, nil
		}
	})
	_, _ = d.cfg.Bus.Listen("n", kindOrder, func(string, string, []byte) { refused++ })
	for _, want := range []int{0, 0, 1, 1} {
		holds.Store(holds.Load() || want > 0)
		hear(t, d, "n")
		if refused != want {
			t.Errorf("refused %d times, want %d", refused, want)
		}
	}
}

// TestRemovedNodeLeavesNothing checks that a directory forgets a silent node that is removed.
func TestRemovedNodeLeavesNothing(t *testing.T) {
	left := make(chan struct{})
	d := hearing(t, func(c *DirectoryConfig) {
		c.Silence, c.Left = time.Millisecond, func(string, string) { close(left) }
	})
	hear(t, d, "n")
	<-left
	if err := d.Remove(t.Context(), "n", "test"); err != nil {
		t.Fatal(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.nodes) > 0 || len(d.arrived) > 0 {
		t.Errorf("the directory has %d nodes and %d announcements, want none", len(d.nodes), len(d.arrived))
	}
}

// hearing opens a Directory that does nothing with what it hears, until the end of the test.
func hearing(t *testing.T, change func(*DirectoryConfig)) *Directory {
	t.Helper()
	cfg := DirectoryConfig{
		Bus: &table{all: map[string][]func(string, string, []byte){}}, Boot: "b", Log: slog.New(slog.DiscardHandler),
		Joined: func(*Client) {}, Heard: func(*Client) {}, Event: func(string, Event) {}, Left: func(string, string) {},
	}
	change(&cfg)
	d, err := OpenDirectory(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d
}

// hear sends an announcement to d, and returns when d has handled it.
func hear(t *testing.T, d *Directory, name string) {
	t.Helper()
	b, err := json.Marshal(Inventory{V: Version, Identity: Identity{Name: name, ID: "A", Boot: "b"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := d.cfg.Bus.Send(name, kindInventory, "", b); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	d.post(func() { close(done) })
	<-done
}
