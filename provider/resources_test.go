package provider

import (
	"errors"
	"math/big"
	"testing"

	"github.com/openfaas/faas-provider/types"

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
		"requests alone":         {nil, &types.FunctionResources{Memory: "1M", CPU: "1e1"}, Resources{MemoryRequest: 1e6, CPURequest: 10_000}},
		"rounded up":             {&types.FunctionResources{Memory: "1.5m", CPU: "0.0001"}, nil, Resources{1, 1, 1, 1}},
		"every kind of a number": {&types.FunctionResources{Memory: "1.5Gi", CPU: "12e-1"}, &types.FunctionResources{Memory: "3k", CPU: "1m"}, Resources{3 << 29, 3000, 1200, 1}},
	} {
		t.Run(name, func(t *testing.T) {
			d := Deployed{Deployment: types.FunctionDeployment{Limits: tc.limits, Requests: tc.requests}}
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

// FuzzQuantity wants no panic, and of what is a quantity a number that is not negative and grows with the scale.
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
