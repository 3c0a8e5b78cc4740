package main

import (
	"context"
	"os"
	"path/filepath"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// httpCases are the networks that a function which speaks HTTP can ask for. The machine's costs nothing, so
// it is what the others are compared with.
func httpCases() []startCase {
	return []startCase{{name: pipeline.NetworkHost}, {name: pipeline.NetworkNone}, {name: pipeline.NetworkDefault}}
}

// newHTTPStage makes a stage of a program that speaks HTTP: the image echo-http in the folder images.
func newHTTPStage(m machine, images string) (*benchStage, error) {
	return newBenchStage(m, func(b *benchStage) error {
		echo := filepath.Join(images, "stagecoach", "echo-http", "0.1.0")
		if err := os.CopyFS(b.root, os.DirFS(echo)); err != nil {
			return err
		}
		b.process, b.env = "./echo-http", map[string]string{"mode": "http"}
		b.input = tensor.Item{ContentType: "text/plain", Bytes: []byte("hello")}
		b.others = map[string]starter{}
		for _, c := range httpCases() {
			b.others[c.name] = func(ctx context.Context) (started, error) {
				return b.start(ctx, func(ctx context.Context) (launched, error) {
					s := b.spec("")
					s.Function, s.Network = c.name+s.Function, c.name
					return b.order(ctx, keysmanager.Order{Spec: s})
				})
			}
		}
		return nil
	})
}
