package pipeline

import (
	"strings"
	"testing"
)

// TestPipelinesThatShareFunctionsNameBothPolicies has three pipelines in a chain of shared stages,
// and one apart.
func TestPipelinesThatShareFunctionsNameBothPolicies(t *testing.T) {
	t.Parallel()
	f := func(name, pipelines, next string, p Policies) Function {
		out := Function{Name: name, Namespace: "ns", Pipelines: strings.Split(pipelines, ","), Policies: p}
		if next != "" {
			out.Next = []Edge{{To: next}}
		}
		return out
	}
	all := Assemble([]Function{
		f("a", "p", "shared", Policies{Rank: RankFair, Route: "best"}), f("shared", "p,q", "", Policies{}),
		f("b", "q", "shared", Policies{Allocator: "sizer"}),
		f("c", "r", "b", Policies{Rank: RankFIFO, Route: "best"}), f("d", "alone", "", Policies{Rank: RankFIFO}),
	})
	// b is in q only, so r's edge to it is a fault; the pipelines are connected all the same.
	all = append(all, Pipeline{Name: "s", Namespace: "ns", Entry: "e", Stages: []Stage{{Function: Function{Name: "e", Policies: Policies{Rank: RankFIFO, Route: "best"}}}, {Function: Function{Name: "b"}}}})
	for _, p := range all {
		var got []string
		for _, fault := range Disagreements(p, all) {
			got = append(got, fault.String())
		}
		text := strings.Join(got, "\n")
		switch want := map[string]string{"p": `pipeline "s"`, "s": `pipeline "p"`}[p.Name]; {
		case want == "" && text != "":
			t.Errorf("pipeline %q: %s, want nothing", p.Name, text)
		case want != "" && (len(got) != 1 || !strings.Contains(text, want) || !strings.Contains(text, `"fair"`) || !strings.Contains(text, `"fifo"`)):
			t.Errorf("pipeline %q: %q, want one fault with both ranks and %s", p.Name, got, want)
		}
	}
}
