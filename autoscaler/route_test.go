package autoscaler

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// levelsText formats the levels of a table's row as LENGTH: LANE PART … | BACKUPS | OVERFLOW.
func levelsText(t *plan.Table) string {
	var out []string
	for _, l := range t.Row(plan.FromClient).Levels {
		text := fmt.Sprintf("%d:", l.MaxLength)
		for _, s := range l.Shares {
			text += fmt.Sprintf(" %s %.2f", s.Lane, s.Part)
		}
		out = append(out, text+" | "+strings.Join(l.Backups, " ")+" | "+l.Overflow)
	}
	return strings.Join(out, "\n")
}

func TestRoutersChooseLanes(t *testing.T) {
	t.Parallel()
	ms := func(n int) plan.Service {
		return plan.Service{Known: true, Mean: time.Duration(n) * time.Millisecond}
	}
	of := func(name, variantOf string, accuracy float64, length int, service plan.Service) plan.Function {
		return plan.Function{Name: name, Variant: plan.Variant{VariantOf: variantOf, Accuracy: accuracy, MaxLength: length}, Service: service, Slots: 1}
	}
	for name, tc := range map[string]struct {
		router    plan.Router
		functions []plan.Function
		slots     []int
		want      string
	}{
		"the most accurate": {Best{}, []plan.Function{of("a", "", 0.8, 0, ms(10)), of("b", "a", 0.9, 0, ms(90)), of("c", "a", 0.85, 0, ms(50))}, []int{1, 1, 1}, "0: b 1.00 | c a | c"},
		"by capacity":       {Best{}, []plan.Function{of("a", "", 0, 0, ms(10)), of("b", "a", 1, 0, ms(30)), of("c", "a", 0.5, 0, ms(1))}, []int{1, 1, 9}, "0: a 0.75 b 0.25 | a b c | c"},
		"unknown service":   {Best{}, []plan.Function{of("a", "", 0, 0, ms(10)), of("b", "a", 0, 0, plan.Service{})}, []int{1, 3}, "0: a 0.25 b 0.75 | a b | "},
		"without a replica": {Best{}, []plan.Function{of("a", "", 0, 0, ms(10)), of("b", "a", 0, 0, ms(10))}, []int{0, 2}, "0: b 1.00 | a b | "},
		"none has one":      {Best{}, []plan.Function{of("a", "", 0, 0, ms(10)), of("b", "a", 0, 0, ms(30))}, []int{0, 0}, "0: a 0.50 b 0.50 | a b | "},
		"by length": {
			Best{},
			[]plan.Function{of("a", "", 0, 0, ms(90)), of("b", "a", 0, 64, ms(10)), of("c", "a", 0, 128, ms(30))},
			[]int{1, 1, 1},
			"64: b 1.00 | c a | c\n128: c 1.00 | a | a\n0: a 1.00 |  | ",
		},
		"accuracy before length": {
			Best{}, []plan.Function{of("a", "", 0.9, 0, ms(90)), of("b", "a", 0.8, 64, ms(10))}, []int{1, 1}, "64: a 1.00 | b | b\n0: a 1.00 |  | ",
		},
		"even": {
			Even{}, []plan.Function{of("a", "", 0.5, 0, ms(90)), of("b", "a", 0.9, 64, ms(10))}, []int{1, 1}, "64: a 0.50 b 0.50 | b a | \n0: a 1.00 |  | ",
		},
	} {
		s := plan.Snapshot{Functions: tc.functions}
		var wants []plan.Want
		for i, f := range tc.functions {
			wants = append(wants, plan.Want{Function: f.Name, Slots: make([]plan.Slot, tc.slots[i])})
		}
		d := plan.Domains(s)[0]
		tables, err := tc.router.Route(s, d, wants)
		if err != nil || len(tables) != 1 {
			t.Errorf("%s: %+v, %v, want one table", name, tables, err)
			continue
		}
		if err := s.RouteFaults(d, tables, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := levelsText(&tables[0]); got != tc.want {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, tc.want)
		}
	}
}
