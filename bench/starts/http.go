package starts

import (
	"context"
	"os"
	"path/filepath"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// HTTPCases returns one case for each kind of network that an HTTP function can ask for. Cases are
// compared with the machine's own network, which costs nothing.
func HTTPCases() []Case {
	return []Case{{Name: pipeline.NetworkHost}, {Name: pipeline.NetworkNone}, {Name: pipeline.NetworkDefault}}
}

// NewHTTPStage makes a stage of a program that speaks HTTP: the image echo-http in the folder
// images.
func NewHTTPStage(m Machine, images string) (*Stage, error) {
	return newStage(m, func(b *Stage) error {
		echo := filepath.Join(images, "stagecoach", "echo-http", "0.1.0")
		if err := os.CopyFS(b.Root, os.DirFS(echo)); err != nil {
			return err
		}
		b.Process, b.Env = "./echo-http", map[string]string{"mode": "http"}
		b.Input = tensor.Item{ContentType: "text/plain", Bytes: []byte("hello")}
		b.Others = map[string]Starter{}
		for _, c := range HTTPCases() {
			b.Others[c.Name] = func(ctx context.Context) (Started, error) {
				return b.Start(ctx, func(ctx context.Context) (Launched, error) {
					s := b.Spec("")
					s.Function, s.Network = c.Name+s.Function, c.Name
					return b.Order(ctx, node.Order{Spec: s})
				})
			}
		}
		return nil
	})
}
