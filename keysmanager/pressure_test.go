package keysmanager

import (
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
)

func TestARefusalSaysWhoHasTheMemory(t *testing.T) {
	const gb = 1 << 30
	n := need{5<<30 + gb*2/5, "model file 5.2 GiB"}
	own := memory{bounds: []resources.Bound{{Name: resources.BoundMachine, Total: 64 * gb, Used: 20 * gb}, {Name: resources.BoundOwn, Total: 24 * gb, Used: 173 * gb / 10}}, coming: gb}
	for name, tc := range map[string]struct {
		m    memory
		own  int64
		want []string
	}{
		"our own share": {own, 173 * gb / 10, []string{
			`zygote of "f.ns" needs about 5.4 GiB (model file 5.2 GiB)`, "2.1 GiB are free of 20.4 GiB (85 % of 24 GiB, --memory)",
			"12 GiB are held by zygotes with replicas: g.ns 8 GiB, h.ns 4 GiB", "1 GiB are kept for loads under way: x.ns 1 GiB", "raise --memory",
		}},
		"others' memory": {memory{bounds: []resources.Bound{{Name: resources.BoundMachine, Total: 24 * gb, Used: 20 * gb}}}, 12 * gb, []string{
			"(85 % of 24 GiB, machine)", "8 GiB are used by other processes", "use a node with more memory",
		}},
		"never": {memory{bounds: []resources.Bound{{Name: resources.BoundCgroup, Total: 4 * gb, Used: 0}}}, 0, []string{"3.4 GiB are free of 3.4 GiB (85 % of 4 GiB, cgroup)", "it can never fit here"}},
	} {
		err := refusal("f.ns", n, tc.m, tc.own, []keeper{{"h.ns", 4 * gb}, {"g.ns", 8 * gb}}, []keeper{{"x.ns", gb}})
		for _, want := range tc.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, want %q in it", name, err, want)
			}
		}
	}
}
