package keysmanager

import (
	"maps"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// TestSpecInImage: what an OCI image says of its environment counts where the function says nothing, and only when the image
// speaks the stage protocol.
func TestSpecInImage(t *testing.T) {
	image := sandbox.Image{Stage: true, Env: []string{"STAGECOACH_MODEL=model/model.onnx", "A=image", "PATH=/none", "bad"}}
	spec := Spec{Function: "f", Env: map[string]string{"A": "function"}}
	got := spec.in(image)
	if want := map[string]string{"STAGECOACH_MODEL": "model/model.onnx", "A": "function"}; !maps.Equal(got.Env, want) {
		t.Errorf("environment %v, want %v", got.Env, want)
	}
	if key := new(Manager).key(got, onnxRuntime, image); len(spec.Env) != 1 || key.model != "model/model.onnx" {
		t.Errorf("the function's own environment is %v now, the zygote's model %q", spec.Env, key.model)
	}
	image.Stage = false
	if got := spec.in(image); !maps.Equal(got.Env, spec.Env) {
		t.Errorf("of another kind: environment %v", got.Env)
	}
}
