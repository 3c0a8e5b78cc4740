package keysmanager

import (
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

func TestWarmLoadsAhead(t *testing.T) {
	n := newNode(t, nil)
	broken, gone := withModel, withModel
	broken.Function, broken.Namespace, broken.Env = "broken.b", "b", map[string]string{"STAGECOACH_MODEL": "nosuch.onnx"}
	gone.Function, gone.Image = "gone.ns", "test/nosuch:1"
	wanted := []node.Wanted{{Spec: gone}, {Spec: broken}, {Spec: node.Spec{Function: "none.ns", Image: "test/wait:1"}}, {Spec: withModel, Key: true}}
	for range 3 {
		err := n.Warm(t.Context(), wanted)
		for _, want := range []string{`warm "gone.ns"`, `warm "broken.b"`} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("got %v, want an error with %q", err, want)
			}
		}
	}
	inv := n.Inventory()
	if len(inv.Zygotes) != 1 || inv.Zygotes[0].Function != "f.ns" || inv.Hits+inv.Misses != 0 {
		t.Errorf("inventory %+v, want f.ns's zygote and neither hits nor misses", inv)
	}
	if len(inv.Failures) != 1 || inv.Failures[0].Function != "broken.b" || inv.Failures[0].Count < 1 || !strings.Contains(inv.Failures[0].Cause, "nosuch.onnx") {
		t.Errorf("failures %+v, want broken.b's", inv.Failures)
	}
	if r := n.start("a", withModel); r.Path != PathHeap {
		t.Errorf("path %s, want fork", r.Path)
	}
}

// countingImages counts how often each image is resolved.
type countingImages struct {
	Images
	looks map[string]int
}

func (c countingImages) Resolve(image string) (sandbox.Image, error) {
	c.looks[image]++
	return c.Images.Resolve(image)
}

// TestWarmReadsImagesSeldom calls Warm repeatedly, as the control plane does every second. Warm
// must not read an image from the disk each time, unless the last read has failed.
func TestWarmReadsImagesSeldom(t *testing.T) {
	looks := map[string]int{}
	n := newNode(t, func(c *Config) { c.Images = countingImages{c.Images, looks} })
	twin, gone := withModel, withModel
	twin.Function, gone.Function, gone.Image = "twin.ns", "gone.ns", "test/nosuch:1"
	for range 3 {
		// The error is that of the image that does not exist.
		_ = n.Warm(t.Context(), []node.Wanted{{Spec: withModel}, {Spec: twin}, {Spec: gone}})
	}
	if looks[withModel.Image] != 1 || looks[gone.Image] != 3 {
		t.Errorf("looked %v, want once at what is there and each time at what is not", looks)
	}
	if _ = n.Warm(t.Context(), nil); len(n.ahead.looked) != 0 {
		t.Errorf("%v are remembered, want none that nobody wants", n.ahead.looked)
	}
}

func TestWarmDoesNotCountAsUse(t *testing.T) {
	n := newNode(t, nil)
	other := withModel
	other.Namespace, other.Function = "other", "f.other"
	both := []node.Wanted{{Spec: withModel}, {Spec: other}}
	if err := n.Warm(t.Context(), both); err != nil {
		t.Fatal(err)
	}
	n.start("a", withModel) // the last one to be used
	if err := n.Warm(t.Context(), both); err != nil {
		t.Fatal(err)
	}
	if oldest := n.store.slots.Keys()[0]; oldest.Namespace != "other" {
		t.Errorf("least recently used is %q's, want other's", oldest.Namespace)
	}
}

func TestForgottenZygotesGoWithTheirReplicas(t *testing.T) {
	n := newNode(t, nil)
	n.answers(n.start("a", withModel))
	z := n.zygote()
	n.Forget("f.ns")
	if len(n.Inventory().Zygotes) != 1 {
		t.Error("a zygote with a replica has gone")
	}
	if err := n.Stop(t.Context(), "a", time.Minute); err != nil {
		t.Fatal(err)
	}
	proctest.Gone(t, z)
	if inv := n.Inventory(); len(inv.Zygotes) != 0 || inv.Evictions != 0 {
		t.Errorf("%+v, want nothing, and no eviction", inv)
	}
}
