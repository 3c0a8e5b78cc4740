package main

import (
	"errors"
	"testing"
	"time"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
)

// resolverFunc is a resolver.
type resolverFunc func(image string) (sandbox.Image, error)

func (f resolverFunc) Resolve(image string) (sandbox.Image, error) { return f(image) }

func TestKindsOfAFunctionDeployedMeanwhile(t *testing.T) {
	deployed := func(image string) *provider.Deployed {
		d := &provider.Deployed{}
		d.Deployment = types.FunctionDeployment{Image: image}
		return d
	}
	for name, next := range map[string]*provider.Deployed{"deployed": deployed("example/server:1"), "removed": nil} {
		t.Run(name, func(t *testing.T) {
			var k *kinds
			looks := 0
			k = &kinds{images: resolverFunc(func(image string) (sandbox.Image, error) {
				if image == "example/server:1" {
					return sandbox.Image{Rootfs: true}, nil
				}
				if looks++; looks == 1 {
					return sandbox.Image{}, errors.New("not there yet")
				}
				k.changed(pipeline.ParseKey("f.ns"), next) // while somebody looks
				return sandbox.Image{Stage: true}, nil
			})}
			k.changed(pipeline.ParseKey("f.ns"), deployed("example/stage:1"))
			for range 2 {
				if got := k.HTTP(pipeline.ParseKey("f.ns")); got != (next != nil) {
					t.Errorf("HTTP: %t", got)
				}
			}
			if _, ok := k.known.Load(pipeline.ParseKey("f.ns")); ok != (next != nil) {
				t.Errorf("known: %t", ok)
			}
		})
	}
}

// TestExecTimeoutOfImages checks that a function's exec_timeout overrides its image's. A value that
// replicas will refuse has no effect.
func TestExecTimeoutOfImages(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		image []string
		env   map[string]string
		want  time.Duration
	}{
		{nil, nil, 0},
		{[]string{"PATH=/bin", "exec_timeout=10"}, nil, 10 * time.Second},
		{[]string{"exec_timeout=10s"}, map[string]string{"exec_timeout": "300ms"}, 300 * time.Millisecond},
		{[]string{"exec_timeout=10s"}, map[string]string{"exec_timeout": ""}, 0},
		{nil, map[string]string{"exec_timeout": "soon"}, 0},
	} {
		if got := execTimeout(tc.image, tc.env); got != tc.want {
			t.Errorf("%v and %v: %v, want %v", tc.image, tc.env, got, tc.want)
		}
	}
}
