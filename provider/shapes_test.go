package provider

import (
	"reflect"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

// recorded is a function as earlier releases stored it.
const recorded = `{"version":1,"deployment":{"service":"f","image":"registry/f:1","namespace":"ns","envProcess":"./f",` +
	`"labels":{"com.openfaas.scale.max":"5","com.openfaas.scale.min":"2","com.openfaas.scale.target":"50",` +
	`"com.openfaas.scale.target-proportion":"0.5","com.openfaas.scale.type":"rps"},` +
	`"annotations":{"stagecoach.dev/batch":"8","stagecoach.dev/gpu":"1","stagecoach.dev/gpu-memory":"1Gi"},` +
	`"limits":{"memory":"64Mi","cpu":"500m"},"requests":{"memory":"32Mi"}},` +
	`"createdAt":"2026-01-02T03:04:05Z","digest":"sha256:aa","guess":{"process":"./f","http":true,"why":"it is the only program"}}`

// TestStoredFunctionsKeepTheirForm reads a function that an earlier release stored, and stores it
// again as the same bytes.
func TestStoredFunctionsKeepTheirForm(t *testing.T) {
	t.Parallel()
	d, err := decode(Entry{Key: "f.ns", Value: []byte(recorded), Revision: 7})
	if err != nil {
		t.Fatal(err)
	}
	if b, err := encode(d); err != nil || string(b) != recorded {
		t.Errorf("%s, %v; want %s", b, err, recorded)
	}
	if d.Revision != 7 || d.Digest != "sha256:aa" || d.Process() != "./f" || d.Declared.Scale.Max != 5 {
		t.Errorf("%+v, want what was stored", d)
	}
}

// TestPlannedHasWhatWasDeployed converts a stored function to the one that policies see.
func TestPlannedHasWhatWasDeployed(t *testing.T) {
	t.Parallel()
	d, err := decode(Entry{Key: "f.ns", Value: []byte(recorded), Revision: 7})
	if err != nil {
		t.Fatal(err)
	}
	points := []plan.Point{{CPUMilli: 500, Batch: 1, Mean: time.Second}}
	want := plan.Function{
		Name: "f.ns", Revision: 7, Min: 2, Max: 5, ZeroAge: d.Declared.Scale.ZeroAge, GPU: 1, DeviceMemory: 1 << 30, Batch: 8,
		Memory: 32 << 20, CPUMilli: 500, CPULimit: 500, Profile: points, Target: plan.Target{Type: "rps", Value: 25},
		Variant: plan.Variant{Accuracy: 1},
	}
	if got := d.Planned(points); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	d.Declared.VariantOf, d.Declared.Accuracy, d.Declared.MaxLength = "g", 0.87, 128
	want.VariantOf, want.Accuracy, want.MaxLength = "g."+d.Declared.Namespace, 0.87, 128
	if got := d.Planned(points); !reflect.DeepEqual(got, want) {
		t.Errorf("a variant: got %+v, want %+v", got, want)
	}
}
