package study

import (
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

// Check returns all faults of a study, for example duplicate names, knobs without a range, and
// seeds that are used for both training and comparison.
func (s *Study) Check() error {
	var errs []error
	add := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	names := map[string]bool{}
	for _, x := range s.Settings {
		if x.Name == "" || names[x.Name] {
			add("setting %q: want a name of its own", x.Name)
		}
		names[x.Name] = true
		if x.Service <= 0 || x.Scenario == nil {
			add("setting %q: service %v, want some, and a scenario", x.Name, x.Service)
		}
	}
	errs = append(errs, s.checkBudgets(), s.checkMore())
	names = map[string]bool{}
	for i := range s.Contenders {
		c := &s.Contenders[i]
		if c.Name == "" || names[c.Name] || c.Apply == nil {
			add("contender %q: want a name of its own, and Apply", c.Name)
		}
		names[c.Name] = true
		if len(c.Defaults) != len(c.Space) || len(c.Space) > len(primes) {
			add("contender %q: %d defaults for %d knobs, want as many, and at most %d", c.Name, len(c.Defaults), len(c.Space), len(primes))
		}
		for _, k := range c.Space {
			if err := k.check(); err != nil {
				add("contender %q: %w", c.Name, err)
			}
		}
		if l := s.contender(c.Like); c.Like != "" && (l == nil || l.Like != "" || !slices.Equal(knobNames(l.Space), knobNames(c.Space))) {
			add("contender %q: like %q, want one that is tuned itself and has the same knobs", c.Name, c.Like)
		}
	}
	if own := s.contender(s.Ours); own == nil {
		add("ours: %q, want one of the contenders", s.Ours)
	} else if own.Cores != s.Cores {
		add("ours: %d cores, want those of the study, %d", own.Cores, s.Cores)
	}
	for _, x := range []struct {
		name string
		Seeds
	}{{"training", s.Train}, {"the test", s.Test}} {
		if x.N < 1 || x.First < 1 {
			add("seeds for %s: %d from %d on, want one or more, from 1 on", x.name, x.N, x.First)
		}
	}
	if s.Train.First < s.Test.First+uint64(max(s.Test.N, 0)) && s.Test.First < s.Train.First+uint64(max(s.Train.N, 0)) {
		add("seeds: %d from %d on for training and %d from %d on for the test, want none in both", s.Train.N, s.Train.First, s.Test.N, s.Test.First)
	}
	if s.Candidates < 1 {
		add("%d candidates, want one or more", s.Candidates)
	}
	if !slices.Contains(s.Multiples, s.Objective) {
		add("objective %g, want one of the multiples %v", s.Objective, s.Multiples)
	}
	return errors.Join(errs...)
}

// checkBudgets returns which groups have settings with different budgets.
func (s *Study) checkBudgets() error {
	var errs []error
	budgets := map[string]float64{}
	for _, x := range s.Settings {
		if b, ok := budgets[x.Group]; ok && b != x.Budget || x.Budget < 0 {
			errs = append(errs, fmt.Errorf("setting %q: a budget of %g GPUs, want that of the rest of %s, which is tuned as one", x.Name, x.Budget, x.Group))
		}
		budgets[x.Group] = x.Budget
	}
	return errors.Join(errs...)
}

// checkMore returns the faults of s.More: its configurations could not be kept with those of s.
func (s *Study) checkMore() error {
	m := s.More
	if m == nil {
		return nil
	}
	if a, b := s.Nothing(), m.Nothing(); !reflect.DeepEqual(a, b) {
		return fmt.Errorf("more: tuned with %+v, want as the study, with %+v", b, a)
	}
	if i := slices.IndexFunc(m.Settings, func(x Setting) bool {
		return slices.ContainsFunc(s.Settings, func(y Setting) bool { return x.Group == y.Group })
	}); i >= 0 {
		return fmt.Errorf("more: setting %q is in %q, want a group that the study does not have", m.Settings[i].Name, m.Settings[i].Group)
	}
	if err := m.Check(); err != nil {
		return fmt.Errorf("more: %w", err)
	}
	return nil
}

// contender returns the contender with this name, or nil.
func (s *Study) contender(name string) *Contender {
	i := slices.IndexFunc(s.Contenders, func(c Contender) bool { return c.Name == name })
	if i < 0 {
		return nil
	}
	return &s.Contenders[i]
}

func knobNames(space []Knob) []string {
	out := make([]string, len(space))
	for i, k := range space {
		out[i] = k.Name
	}
	return out
}

// Only keeps the settings whose names match the pattern up to its first slash, and the contenders
// whose names match the rest. Both parts are regular expressions. s.More is reduced, too, and left
// out if nothing of it matches. Call Only after [Study.Check].
func (s *Study) Only(pattern string) error {
	settings, contenders, _ := strings.Cut(pattern, "/")
	if s.More != nil {
		more := *s.More
		s.More = nil
		if more.Only(pattern) == nil {
			s.More = &more
		}
	}
	if s.More != nil && s.matching(settings) == 0 {
		*s = *s.More
		return nil
	}
	var errs [2]error
	s.Settings, errs[0] = only(settings, s.Settings, func(x Setting) string { return x.Name })
	s.Contenders, errs[1] = only(contenders, s.Contenders, func(c Contender) string { return c.Name })
	return errors.Join(errs[:]...)
}

// matching returns how many settings match a pattern.
func (s *Study) matching(pattern string) int {
	all, err := only(pattern, s.Settings, func(x Setting) string { return x.Name })
	if err != nil {
		return 0
	}
	return len(all)
}

func only[T any](pattern string, all []T, name func(T) string) ([]T, error) {
	r, err := regexp.Compile(pattern)
	if err != nil {
		return nil, err
	}
	var out []T
	var names []string
	for _, x := range all {
		if names = append(names, name(x)); r.MatchString(name(x)) {
			out = append(out, x)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%q matches none, want some of %s", pattern, strings.Join(names, ", "))
	}
	return out, nil
}
