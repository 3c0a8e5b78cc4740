package study

import (
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// withMore returns the small study, with more: its setting "busy" under another name, slower for
// all contenders, and without configurations of its own.
func withMore() *Study {
	s, more := small(), small()
	x := &more.Settings[1]
	x.Name, x.TunedAs, x.Group, x.Train = "slower", x.Group, "slow", false
	x.Then = func(s sim.Scenario) sim.Scenario {
		for i := range s.Stages {
			s.Stages[i].Service.Mean += 5 * time.Millisecond
		}
		return s
	}
	more.Settings, more.Contenders, more.Test.N = more.Settings[1:], more.Contenders[:2], 2
	s.More = more
	return s
}

// TestMoreUsesTheConfigurationsOfTheStudy checks that more settings are evaluated on their own
// seeds, with the configurations of the group that they name, and under their own condition.
func TestMoreUsesTheConfigurationsOfTheStudy(t *testing.T) {
	s := withMore()
	if err := s.Check(); err != nil {
		t.Fatal(err)
	}
	r := run2(t, s)
	o, usual := r.More.Outcome("slower", "two"), r.Outcome("busy", "two")
	if o.TunedAs != "load 80" || o.Untuned || o.Knobs[0] != usual.Knobs[0] || len(o.Mean.Seeds) != 2 {
		t.Errorf("%+v, want two seeds with the configuration of load 80, %v", o, usual.Knobs)
	}
	if more := o.Mean.Mean - usual.Mean.Mean; more < 0.010 {
		t.Errorf("two stages with 5 ms more take %g s more, want at least 10 ms", more)
	}
	var b strings.Builder
	if err := r.WriteMarkdown(&b); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(b.String(), "for another group: slow from load 80") || len(r.More.Tuned.Choices) > 0 {
		t.Error("the report of more does not name the group that its configurations are from, or repeats them")
	}
}

// TestOnlyReducesMore checks a pattern that matches both parts of a study, or one of them.
func TestOnlyReducesMore(t *testing.T) {
	for pattern, want := range map[string]string{"": "idle busy slower", "s": "busy slower", "slower/two": "slower", "idle": "idle"} {
		s := withMore()
		if err := s.Only(pattern); err != nil {
			t.Fatal(err)
		}
		var got []string
		for x := s; x != nil; x = x.More {
			for _, set := range x.Settings {
				got = append(got, set.Name)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%q: %q, want %q", pattern, got, want)
		}
	}
	s := withMore()
	if err := s.Only("none"); err == nil {
		t.Error("a pattern that matches nothing is no error")
	}
}

// TestCheckRefusesMoreThatWasTunedOtherwise checks faults of more settings.
func TestCheckRefusesMoreThatWasTunedOtherwise(t *testing.T) {
	for want, spoil := range map[string]func(m *Study){
		"more: tuned with":                   func(m *Study) { m.Candidates++ },
		`more: setting "slower" is in "load`: func(m *Study) { m.Settings[0].Group = "load 80" },
		"more: ours: 0 cores":                func(m *Study) { m.Cores = 8 },
	} {
		s := withMore()
		spoil(s.More)
		if err := s.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
}

// TestResultHasTheChoicesOfItsGroups checks that a result has the configurations that its
// contenders got for its groups and for those that its settings name, and no others.
func TestResultHasTheChoicesOfItsGroups(t *testing.T) {
	of := func(keys ...string) (all []Choice) {
		for _, key := range keys {
			group, contender, _ := strings.Cut(key, "/")
			all = append(all, Choice{Group: group, Contender: contender})
		}
		return all
	}
	r := &Result{
		Settings: []SettingInfo{{Group: "a"}}, Outcomes: []Outcome{{Contender: "x", TunedAs: "b"}},
		More: &Result{Settings: []SettingInfo{{Group: "c"}}, Outcomes: []Outcome{{Contender: "y", TunedAs: "d"}, {Contender: "x"}}},
	}
	if got, want := used(r, of("a/x", "b/x", "c/y", "d/x", "e/x", "a/z")), of("a/x", "b/x", "c/y", "d/x"); !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
