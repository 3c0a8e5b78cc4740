package main

import "testing"

// TestSuccessor chooses a control plane that could lead in place of one that reaches no node.
func TestSuccessor(t *testing.T) {
	for name, tc := range map[string]struct {
		others []controlPlane
		want   string
	}{
		"alone":                 {nil, ""},
		"nobody reaches a node": {[]controlPlane{{Name: "a"}, {Name: "b"}}, ""},
		"one reaches nodes":     {[]controlPlane{{Name: "a"}, {Name: "b", Reaches: 2}}, "b"},
		"it lacks secrets":      {[]controlPlane{{Name: "a", Reaches: 2, Lacking: 1}}, ""},
		"it leads already":      {[]controlPlane{{Name: "a", Reaches: 2, Leads: true}}, ""},
	} {
		if is, ok := successor(tc.others); is.Name != tc.want || ok != (tc.want != "") {
			t.Errorf("%s: %q, %v, want %q", name, is.Name, ok, tc.want)
		}
	}
}
