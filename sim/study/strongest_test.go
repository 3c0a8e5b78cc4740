package study

import (
	"slices"
	"strings"
	"testing"
)

// TestStrongestHasEqualMeans checks which contender is the strongest opponent of a group: one for
// the whole group, with the cores of the study, within the budget, and evaluated wherever ours was.
func TestStrongestHasEqualMeans(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(r *Result)
		want   string
	}{
		"the fastest within the budget": {func(*Result) {}, "lean"},
		"it has fewer cores": {func(r *Result) {
			r.Cores = 8
			for i := range r.Contenders {
				if r.Contenders[i].Name != "lean" {
					r.Contenders[i].Cores = 8
				}
			}
		}, ""},
		"a faster one is within the budget":   {func(r *Result) { raise(r, "rich", 10) }, "rich"},
		"it is a part of ours":                {func(r *Result) { mark(r, "lean", func(c *ContendInfo) { c.Ours = true }) }, ""},
		"it knows the future":                 {func(r *Result) { mark(r, "lean", func(c *ContendInfo) { c.Oracle = true }) }, ""},
		"it was not evaluated everywhere":     {func(r *Result) { drop(r, "y", "lean") }, ""},
		"the faster one is over the budget":   {func(r *Result) { raise(r, "rich", 13) }, "lean"},
		"it is, but so is ours, by even more": {func(r *Result) { raise(r, "rich", 13); raise(r, "ours", 14) }, "rich"},
	} {
		r := madeUpResult()
		raise(r, "rich", 13)
		tc.change(r)
		if got := strongest(r, "g"); got != tc.want {
			t.Errorf("%s: %q, want %q", name, got, tc.want)
		}
	}
}

// raise sets the GPUs of a contender on all settings.
func raise(r *Result, contender string, gpus float64) {
	for i := range r.Outcomes {
		if o := &r.Outcomes[i]; o.Contender == contender {
			o.GPUs.Mean = gpus
		}
	}
}

func mark(r *Result, contender string, as func(*ContendInfo)) {
	as(&r.Contenders[slices.IndexFunc(r.Contenders, func(c ContendInfo) bool { return c.Name == contender })])
}

func drop(r *Result, setting, contender string) {
	r.Outcomes = slices.DeleteFunc(r.Outcomes, func(o Outcome) bool { return o.Setting == setting && o.Contender == contender })
}

// TestHeadlinesNameWhereOursLoses checks that the report names the groups where ours is slower,
// gives models that were not tuned on their own rows, and names borrowed configurations.
func TestHeadlinesNameWhereOursLoses(t *testing.T) {
	r := madeUpResult()
	text := func() string {
		var b strings.Builder
		headlines(r, &b)
		return b.String()
	}
	if got := text(); strings.Contains(got, "slower") || strings.Contains(got, "another group") {
		t.Errorf("ours is faster, and nothing is borrowed: %s", got)
	}
	for i := range r.Outcomes {
		if o := &r.Outcomes[i]; o.Contender == "ours" {
			for k := range o.Mean.Seeds {
				o.Mean.Seeds[k] *= 10
			}
		}
	}
	r.Settings[0].Model, r.Settings[0].Train, r.Settings[1].Model = "seen", true, "unseen"
	r.Outcomes[0].TunedAs, r.Outcomes[0].Knobs = "h", []float64{1}
	raise(r, "ours", 11)
	got := text()
	for _, want := range []string{"is slower, beyond chance: g (", "| tuned on ", "| not tuned on ", "| all groups ", "| g § ", "for another group: g from h."} {
		if !strings.Contains(got, want) {
			t.Errorf("no %q in %s", want, got)
		}
	}
}

// TestExpectationsAreComparedWithTheirResults checks the three results of an expectation, and that
// one without a comparison is left out.
func TestExpectationsAreComparedWithTheirResults(t *testing.T) {
	r := madeUpResult() // ours takes half of lean's time on each seed
	of := func(group, against string, from, to float64) Expectation {
		return Expectation{group, against, [2]float64{from, to}, "so"}
	}
	got := expected(r, []Expectation{
		of("g", Strongest, -0.6, -0.4), of("g", "lean", -0.3, 0), of("g", "lean", -0.9, -0.7), of("g", "nobody", -0.5, 0), of("h", "lean", -0.5, 0),
	})
	var came []string
	for _, x := range got {
		came = append(came, x.Came)
	}
	if want := []string{"as expected", "better", "worse"}; !slices.Equal(came, want) {
		t.Errorf("got %q, want %q", came, want)
	}
	for text, want := range map[string]string{
		`[{"group":"g"}]`: "number 1",
		`[{"group":"g","against":"a","why":"w","latency":[0.1,-0.1]}]`: "number 1",
		`[{"sign":"less"}]`: "unknown field",
	} {
		if _, err := ReadExpectations([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}
