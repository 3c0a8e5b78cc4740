package main

import (
	"context"
	"slices"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// recordingKeeper is a KeysManager that records which functions it forgets.
type recordingKeeper struct {
	keeper

	during    func() // runs during each order
	forgotten []string
}

func (k *recordingKeeper) Start(context.Context, node.Order, func(node.Phase)) (node.Started, error) {
	k.during()
	return node.Started{}, nil
}

func (k *recordingKeeper) Warm(context.Context, []node.Wanted) error {
	k.during()
	return nil
}

func (k *recordingKeeper) Forget(function string) { k.forgotten = append(k.forgotten, function) }

// TestOrdersForRemovedFunctionsKeepNothing sends orders that were made before a function was
// removed. The KeysManager forgets the function after each order, and no other function.
func TestOrdersForRemovedFunctionsKeepNothing(t *testing.T) {
	deployed := []string{"kept.ns"}
	k := &recordingKeeper{}
	n := localNode{keeper: k, deployed: func(function string) bool { return slices.Contains(deployed, function) }}
	wanted := []node.Wanted{{Spec: node.Spec{Function: "kept.ns"}}, {Spec: node.Spec{Function: "gone.ns"}}}
	warm := func() error { return n.Warm(t.Context(), wanted) }
	start := func() error {
		for _, w := range wanted {
			if _, err := n.Start(t.Context(), node.Order{Spec: w.Spec}, nil); err != nil {
				return err
			}
		}
		return nil
	}
	for name, order := range map[string]func() error{"warm": warm, "start": start} {
		for when, at := range map[string]func(){"before": func() {}, "during": func() { deployed = []string{"kept.ns"} }} {
			k.forgotten, k.during = nil, at
			if when == "during" {
				deployed = []string{"kept.ns", "gone.ns"}
			}
			if err := order(); err != nil || !slices.Equal(k.forgotten, []string{"gone.ns"}) {
				t.Errorf("%s, removed %s: it forgets %q, %v, want gone.ns", name, when, k.forgotten, err)
			}
			deployed = []string{"kept.ns"}
		}
	}
}
