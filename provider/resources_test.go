package provider

import (
	"errors"
	"math/big"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

func TestResources(t *testing.T) {
	for name, tc := range map[string]struct {
		limits, requests *types.FunctionResources
		want             Resources
	}{
		"none":                   {nil, nil, Resources{}},
		"a limit is a request":   {&types.FunctionResources{Memory: "128Mi", CPU: "500m"}, nil, Resources{128 << 20, 128 << 20, 500, 500}},
		"a request of its own":   {&types.FunctionResources{Memory: "1Gi", CPU: "2"}, &types.FunctionResources{Memory: "64Mi", CPU: "0.1"}, Resources{1 << 30, 64 << 20, 2000, 100}},
		"nothing is requested":   {&types.FunctionResources{Memory: "1Gi"}, &types.FunctionResources{Memory: "0"}, Resources{MemoryLimit: 1 << 30}},
		"requests alone":         {nil, &types.FunctionResources{Memory: "10M", CPU: "1e1"}, Resources{MemoryRequest: 1e7, CPURequest: 10_000}},
		"rounded up":             {&types.FunctionResources{Memory: "5000000000.5m", CPU: "0.0011"}, nil, Resources{5_000_001, 5_000_001, 2, 2}},
		"every kind of a number": {&types.FunctionResources{Memory: "1.5Gi", CPU: "12e-1"}, &types.FunctionResources{Memory: "5000k", CPU: "1m"}, Resources{3 << 29, 5e6, 1200, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			d := Deployed{stored: stored{Deployment: types.FunctionDeployment{Limits: tc.limits, Requests: tc.requests}}}
			if errs := append(append(checkResources("limits", tc.limits), checkResources("requests", tc.requests)...), checkRequests(tc.limits, tc.requests)...); len(errs) > 0 {
				t.Errorf("refused: %v", errs)
			}
			if got := d.Resources(); got != tc.want {
				t.Errorf("%+v, want %+v", got, tc.want)
			}
		})
	}
}

func TestResourcesRefused(t *testing.T) {
	for name, tc := range map[string]struct {
		limits, requests types.FunctionResources
		path             string
	}{
		"no number":         {types.FunctionResources{Memory: "much"}, types.FunctionResources{}, "limits.memory"},
		"negative":          {types.FunctionResources{CPU: "-1"}, types.FunctionResources{}, "limits.cpu"},
		"no such unit":      {types.FunctionResources{Memory: "1Xi"}, types.FunctionResources{}, "limits.memory"},
		"too much":          {types.FunctionResources{Memory: "2000E"}, types.FunctionResources{}, "limits.memory"},
		"too much still":    {types.FunctionResources{Memory: "9e99"}, types.FunctionResources{}, "limits.memory"},
		"too many cores":    {types.FunctionResources{}, types.FunctionResources{CPU: "2k"}, "requests.cpu"},
		"more than allowed": {types.FunctionResources{Memory: "128Mi"}, types.FunctionResources{Memory: "129Mi"}, "requests.memory"},
		"hardly any memory": {types.FunctionResources{Memory: "4194303"}, types.FunctionResources{}, "limits.memory"},
		"hardly any core":   {types.FunctionResources{}, types.FunctionResources{CPU: "0.000999"}, "requests.cpu"},
		"more cores than":   {types.FunctionResources{CPU: "0.5"}, types.FunctionResources{CPU: "501m"}, "requests.cpu"},
	} {
		t.Run(name, func(t *testing.T) {
			errs := append(append(checkResources("limits", &tc.limits), checkResources("requests", &tc.requests)...), checkRequests(&tc.limits, &tc.requests)...)
			var bad *pipeline.FieldError
			if len(errs) != 1 || !errors.As(errs[0], &bad) || bad.Path != tc.path {
				t.Errorf("%v, want one error at %s", errs, tc.path)
			}
		})
	}
}

// TestDeployNeedsRoom checks that a deploy is refused if no node could hold its replicas. The
// answer must have the field that asks for too much, and what the nodes have. If the deploy is an
// update, the function must stay as it was.
func TestDeployNeedsRoom(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	var needs plan.Function
	var lacks []string
	a.fakes.lacking = func(n plan.Function) (out []plan.Lack) {
		needs = n
		for _, of := range lacks {
			out = append(out, plan.Lack{Of: plan.Resource(of), Need: "much of it", Most: "the largest node, n1, has little"})
		}
		return out
	}
	const deployment = `{"service":"big","image":"stagecoach/echo:1","limits":{"memory":"500Gi","cpu":"4"},"requests":{"cpu":"2"},
		"annotations":{"stagecoach.dev/gpu":"2","stagecoach.dev/gpu-memory":"8Gi"}}`
	for of, field := range map[string][2]string{
		"memory":        {"limits.memory", `"500Gi"`},
		"cpu":           {"requests.cpu", `"2"`},
		"devices":       {`annotations["stagecoach.dev/gpu"]`, `"2"`},
		"device-memory": {`annotations["stagecoach.dev/gpu-memory"]`, `"8Gi"`},
	} {
		lacks = []string{of}
		code, text := a.do(post, functions, deployment, "Accept", "application/json")
		p := decodeJSON[problem](t, text)
		if code != http.StatusBadRequest || len(p.Fields) != 1 || p.Fields[0].Path != field[0] || !strings.HasPrefix(p.Fields[0].Got, field[1]+": a replica needs much") ||
			!strings.Contains(p.Fields[0].Want, "the largest node, n1, has little") {
			t.Errorf("%s: status %d, %+v, want 400 and field %q", of, code, p.Fields, field)
		}
	}
	got := plan.Function{Memory: needs.Memory, CPUMilli: needs.CPUMilli, GPU: needs.GPU, DeviceMemory: needs.DeviceMemory}
	if want := (plan.Function{Memory: 500 << 30, CPUMilli: 2000, GPU: 2, DeviceMemory: 8 << 30}); !reflect.DeepEqual(got, want) {
		t.Errorf("asked for room for %+v, want %+v", needs, want)
	}
	lacks = []string{"memory", "cpu"}
	if _, text := a.do(post, functions, deployment, "Accept", "application/json"); len(decodeJSON[problem](t, text).Fields) != 2 {
		t.Errorf("%s, want both fields", text)
	}
	lacks = nil
	a.must(http.StatusAccepted, post, functions, deployment)
	lacks = []string{"memory"}
	a.must(http.StatusBadRequest, put, functions, strings.Replace(deployment, "500Gi", "600Gi", 1))
	if s := a.must(http.StatusOK, get, "/system/function/big", ""); !strings.Contains(s, `"500Gi"`) {
		t.Errorf("after a refused update: %s", s)
	}
}

// FuzzQuantity checks that parsing does not panic, and that a valid quantity is not negative and
// grows with the scale.
func FuzzQuantity(f *testing.F) {
	for _, s := range []string{"", "128Mi", "0.5", "100m", "1e3", "1E", "12e-7", "1.", "٣"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		one, ok := parseQuantity(s, 1)
		if !ok {
			return
		}
		milli, _ := parseQuantity(s, 1000)
		if one.Sign() < 0 || milli.Cmp(one) < 0 || milli.Cmp(new(big.Int).Mul(one, big.NewInt(1000))) > 0 {
			t.Errorf("%q is %v and %v thousandths", s, one, milli)
		}
	})
}
