package function

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

func TestReplyRepeatsTheText(t *testing.T) {
	got, err := reply(tensor.Item{ContentType: "text/plain", Bytes: []byte("hello")})
	if err != nil || string(got.Bytes) != "You said: hello\n" {
		t.Errorf("got %q, %v", got.Bytes, err)
	}
	if _, err := reply(tensor.Item{Tensors: []tensor.Tensor{{Name: "x"}}}); err == nil {
		t.Error("tensors count as text")
	}
}
