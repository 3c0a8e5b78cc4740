package running

import (
	"testing"
	"time"
)

// TestDeploymentsOfVariants checks that a stage's variants are deployed as variants of it, with
// their own times and replicas, and without a place in the pipeline.
func TestDeploymentsOfVariants(t *testing.T) {
	c := Case{Name: "a_b", SLO: time.Second, Stages: Link([]Stage{
		{Name: "one", Mean: time.Millisecond, Replicas: 1, Variants: []Stage{{Name: "other", Mean: 2 * time.Millisecond, Replicas: 3}}},
		{Name: "two", Mean: time.Millisecond, Replicas: 1, Each: true},
	})}
	all := c.Deployments()
	if len(all) != 3 || all[0].Service != "one" || all[1].Service != "other" || all[2].Service != "two" {
		t.Fatalf("%+v, want one, its variant, two", all)
	}
	if a := all[0].Annotations; len(a) != 3 || a["stagecoach.dev/pipeline"] != "a-b" || a["stagecoach.dev/next"] != "two" || a["stagecoach.dev/slo"] != "1s" {
		t.Errorf("annotations of the stage %v", a)
	}
	if v := all[1]; len(v.Annotations) != 1 || v.Annotations["stagecoach.dev/variant-of"] != "one" || v.EnvVars["wait_mean"] != "2ms" || v.Labels["com.openfaas.scale.min"] != "3" {
		t.Errorf("variant %+v", v)
	}
	if a := all[2].Annotations; len(a) != 2 || a["stagecoach.dev/each"] != "true" {
		t.Errorf("annotations of the second stage %v", a)
	}
}
