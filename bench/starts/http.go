package starts

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// HTTPCases returns one case for each kind of network that an HTTP function can ask for. Cases are
// compared with the machine's own network, which costs nothing.
func HTTPCases() []Case {
	return []Case{{Name: pipeline.NetworkHost}, {Name: pipeline.NetworkNone}, {Name: pipeline.NetworkDefault}}
}

// SpareCase is a start with the default network that finds a spare container.
var SpareCase = Case{Name: "spare"}

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
		b.Others[SpareCase.Name] = b.withSpare
		return nil
	})
}

// withSpare starts a replica once its function has a spare container. The first start makes one.
func (b *Stage) withSpare(ctx context.Context) (Started, error) {
	s := b.Spec("")
	s.Function, s.Options.Spares = SpareCase.Name+s.Function, 1
	if b.spares {
		if err := b.awaitSpare(ctx, s.Function); err != nil {
			return Started{}, err
		}
	}
	b.spares = true
	return b.Start(ctx, func(ctx context.Context) (Launched, error) { return b.Order(ctx, node.Order{Spec: s}) })
}

// spareTime bounds the wait for a spare container.
const spareTime = time.Minute

// awaitSpare waits until a function has a spare container.
func (b *Stage) awaitSpare(ctx context.Context, function string) error {
	ctx, cancel := context.WithTimeout(ctx, spareTime)
	defer cancel()
	for b.Keys.Inventory().Spares[function] == 0 {
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("no spare container of %s after %v", function, spareTime)
		}
	}
	return nil
}
