package items

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// TestNodesGetItemsOfAControlPlane checks that a node gets an item from the control plane that has
// its request, until the request ends, and that a node needs the whole reference for that.
func TestNodesGetItemsOfAControlPlane(t *testing.T) {
	c := newCluster(t)
	a := c.node("up", 64<<20) // even if its name is that of the control plane
	content := random(1<<20 + 3)
	stored, err := c.plane.Put("r1", content)
	if err != nil {
		t.Fatal(err)
	}
	ref, err := c.plane.Offer(stored)
	if err != nil {
		t.Fatal(err)
	}
	if ref.Size != stored.Size || ref.Node != "up" || ref.Address != tensor.AtControl || ref.Blob == stored.Blob || ref.Owner != "r1" {
		t.Errorf("the reference is %+v", ref)
	}
	if again, err := c.plane.Offer(stored); err != nil || again != ref {
		t.Errorf("offered again as %+v, %v, want %+v", again, err, ref)
	}
	release, err := a.Reserve(t.Context(), []tensor.Ref{ref})
	if err != nil {
		t.Fatal(err)
	}
	if got := a.Fetching().Used; got != ref.Size {
		t.Errorf("%d bytes are reserved, want %d", got, ref.Size)
	}
	f, err := a.Fetch(t.Context(), ref)
	holds(t, f, err, content)
	release()
	if got, want := a.Carried(), (Carried{Relayed: 1, RelayedBytes: uint64(len(content))}); got != want {
		t.Errorf("the node counts %+v, want %+v", got, want)
	}
	until(t, "the control plane to count it", func() bool {
		p := c.plane.Passed()
		return p == Passed{Given: 1, GivenBytes: uint64(len(content))}
	})

	for what, change := range map[string]func(*tensor.Ref){
		"another request":       func(r *tensor.Ref) { r.Owner = "r2" },
		"the name in the store": func(r *tensor.Ref) { r.Blob = stored.Blob },
		"another size":          func(r *tensor.Ref) { r.Size-- },
		"another sum":           func(r *tensor.Ref) { r.Sum++ },
	} {
		wrong := ref
		change(&wrong)
		f, err := a.Fetch(t.Context(), wrong)
		fails(t, what, f, err, "this control plane does not offer the item")
	}
	other := ref
	other.Node = "another"
	f, err = a.Fetch(t.Context(), other)
	fails(t, "another control plane", f, err, "no connection")
	_, err = c.plane.Get(ref)
	var lost *task.LostError
	if !errors.As(err, &lost) || lost.Item != ref.Blob || !strings.Contains(lost.Text, "only nodes can fetch items of a control plane") {
		t.Errorf("for another control plane: %v", err)
	}

	if err := c.plane.Drop("r1"); err != nil {
		t.Fatal(err)
	}
	f, err = a.Fetch(t.Context(), ref)
	fails(t, "after the request's end", f, err, "its request has ended")
	if _, err := c.plane.Offer(stored); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("offered after the request's end: %v", err)
	}
	if n := len(c.plane.offers.names) + len(c.plane.offers.owners); n > 0 {
		t.Errorf("%d offers are left", n)
	}
}

// TestChangedItemsAreNotUsed damages the file of an item after it was offered, and before.
func TestChangedItemsAreNotUsed(t *testing.T) {
	c := newCluster(t)
	a := c.node("a", 64<<20)
	stored, err := c.plane.Put("r1", random(100<<10))
	if err != nil {
		t.Fatal(err)
	}
	ref, err := c.plane.Offer(stored)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(c.blobs, "o-r1", "b-"+stored.Blob)
	if err := os.WriteFile(file, bytes.Repeat([]byte{1}, 100<<10), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := a.Fetch(t.Context(), ref)
	fails(t, "other bytes", f, err, "checksum")
	if err := os.Truncate(file, 10); err != nil {
		t.Fatal(err)
	}
	f, err = a.Fetch(t.Context(), ref)
	fails(t, "less bytes", f, err, "its bytes did not come")
	short, err := c.plane.Put("r2", random(100<<10))
	if err == nil {
		err = os.Truncate(filepath.Join(c.blobs, "o-r2", "b-"+short.Blob), 10)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.plane.Offer(short); err == nil || !strings.Contains(err.Error(), "10 bytes, want 102400") {
		t.Errorf("a short item is offered: %v", err)
	}
	if len(c.plane.offers.owners) != 1 {
		t.Errorf("offers of %d requests are left, want those of one", len(c.plane.offers.owners))
	}
}
