package cluster

import (
	"context"
	"fmt"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// tooLarge is the error of a start whose parameters do not fit.
type tooLarge int64

func (tooLarge) Error() string        { return "no room" }
func (e tooLarge) NeedsMemory() int64 { return int64(e) }

// TestSizesOfParametersAreLearned checks that a snapshot has the size of parameters that did not
// fit, so that the placer chooses another node.
func TestSizesOfParametersAreLearned(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.start = func(context.Context, node.Order) error { return fmt.Errorf("start: %w", tooLarge(5<<30)) }
		w.waiting["f.ns"] = 1
		if s, _ := l.Observe(t.Context()); s.Functions[0].Parameters != 0 {
			t.Errorf("%d bytes before any start, want none known", s.Functions[0].Parameters)
		}
		w.want(1)
		if s, _ := l.Observe(t.Context()); s.Functions[0].Parameters != 5<<30 {
			t.Errorf("%d bytes after they did not fit, want 5 GiB", s.Functions[0].Parameters)
		}
	})
}

func TestSizesOfParametersAreOfARevision(t *testing.T) {
	var p parameters
	p.follow(2)
	p.refused(1, tooLarge(7)) // an old one
	p.refused(2, nil)
	if p.bytes != 0 {
		t.Errorf("%d bytes, want none known", p.bytes)
	}
	p.refused(2, tooLarge(7))
	p.refused(2, tooLarge(5))
	if p.bytes != 7 {
		t.Errorf("%d bytes, want the most", p.bytes)
	}
	p.follow(3)
	if p.bytes != 0 {
		t.Errorf("%d bytes of a new revision, want none known", p.bytes)
	}
}

// TestSizesOfParametersAreThoseOfZygotes checks that loaded parameters say their size.
func TestSizesOfParametersAreThoseOfZygotes(t *testing.T) {
	bubble(t, func(t *testing.T, w *world, l *Local) {
		w.want(1)
		s, err := l.Observe(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		s.Nodes[0].Zygotes = []plan.Zygote{{Function: "f.ns", Digest: "d", Bytes: 3 << 30}}
		l.mu.Lock()
		learnParameters(l.functions, &s)
		l.mu.Unlock()
		if s, _ := l.Observe(t.Context()); s.Functions[0].Parameters != 3<<30 {
			t.Errorf("%d bytes, want 3 GiB", s.Functions[0].Parameters)
		}
	})
}
