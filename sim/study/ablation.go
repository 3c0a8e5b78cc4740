package study

import (
	"fmt"
	"strings"
)

// parts compares ours without each of its parts with ours. It says in how many runs the part
// changed a decision: without one, the part was not tested.
func (r *Result) parts(b *strings.Builder) {
	t := table{append([]string{"without a part", "group", "settings", "runs with other decisions"}, pairHeading...)}
	var idle []string
	for _, c := range r.Contenders {
		if c.Like != r.Ours {
			continue
		}
		other, of := 0, 0
		for _, group := range r.groupNames() {
			settings := settingsOf(r, group)
			p, ok := r.Compare(c.Name, r.Ours, settings...)
			if !ok {
				continue
			}
			n, runs := differ(r, c.Name, settings)
			other, of = other+n, of+runs
			t.row(append([]string{c.Title, group, fmt.Sprint(len(p.Settings)), fmt.Sprintf("%d of %d", n, runs)}, p.row()...)...)
		}
		if of > 0 && other == 0 {
			idle = append(idle, fmt.Sprintf("%s (%d runs)", clean(c.Title), of))
		}
	}
	if len(t) < 2 {
		return
	}
	fmt.Fprintf(b, "\n## %s without each of its parts\n\nOver the whole, with the whole's configuration: above 0 %%, the part helps with latency or saves GPU-seconds.\n", clean(r.title(r.Ours)))
	t.write(b)
	if len(idle) > 0 {
		fmt.Fprintf(b, "\nNot one decision differs from the whole's, so these rows say nothing about the part: %s.\n", strings.Join(idle, "; "))
	}
}

// differ returns in how many runs on the settings an ablation decided otherwise than ours, and how
// many runs both have.
func differ(r *Result, ablation string, settings []string) (other, of int) {
	for _, s := range settings {
		a, b := r.Outcome(s, ablation), r.Outcome(s, r.Ours)
		if a == nil || b == nil {
			continue
		}
		for i := range min(len(a.Decisions), len(b.Decisions)) {
			if of++; a.Decisions[i] != b.Decisions[i] {
				other++
			}
		}
	}
	return other, of
}

// settingsOf returns the names of a group's settings.
func settingsOf(r *Result, group string) []string {
	var out []string
	for _, s := range r.Settings {
		if s.Group == group {
			out = append(out, s.Name)
		}
	}
	return out
}
