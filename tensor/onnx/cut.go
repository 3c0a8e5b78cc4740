package onnx

import (
	"fmt"
	"maps"
	"os"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/stagecoach-serving/stagecoach/internal/third_party/onnx/onnxpb"
)

// Read reads a model. It does not read weights in external files.
func Read(path string) (*onnxpb.ModelProto, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read model: %w", err)
	}
	m := &onnxpb.ModelProto{}
	if err := proto.Unmarshal(b, m); err != nil {
		return nil, fmt.Errorf("read model %s: %w", path, err)
	}
	if m.GetGraph() == nil {
		return nil, fmt.Errorf("read model %s: it has no graph, want an ONNX model", path)
	}
	return m, nil
}

// Write writes a model. A model with weights in external files must be written into the folder that
// it was read from.
func Write(path string, m *onnxpb.ModelProto) error {
	b, err := proto.Marshal(m)
	if err != nil {
		return fmt.Errorf("write model %s: %w", path, err)
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		return fmt.Errorf("write model: %w", err)
	}
	return nil
}

// point is a tensor at which a graph can be cut.
type point struct {
	tensor string
	work   int // matrix products and convolutions up to this point
}

// CutPoints returns, in order, the names of the tensors at which m can be cut in two. Everything
// that later nodes need from the inputs goes through such a tensor, except the carried inputs,
// which every stage may read. A transformer's mask is a carried input, because each layer needs it.
func CutPoints(m *onnxpb.ModelProto, carried ...string) ([]string, error) {
	g, err := open(m, carried)
	if err != nil {
		return nil, err
	}
	var names []string
	points, _ := g.points()
	for _, p := range points {
		names = append(names, p.tensor)
	}
	return names, nil
}

func open(m *onnxpb.ModelProto, carried []string) (*graph, error) {
	if m.GetGraph() == nil {
		return nil, fmt.Errorf("model without a graph, want an ONNX model")
	}
	for _, name := range carried {
		if !slices.ContainsFunc(m.GetGraph().GetInput(), func(in *onnxpb.ValueInfoProto) bool { return in.GetName() == name }) {
			return nil, fmt.Errorf("carried %q is no input of the model", name)
		}
	}
	return analyse(m.GetGraph(), carried), nil
}

// Balanced chooses n−1 of the model's cut points. The n stages between them have similar numbers of
// matrix products and convolutions.
func Balanced(m *onnxpb.ModelProto, n int, carried ...string) ([]string, error) {
	g, err := open(m, carried)
	if err != nil {
		return nil, err
	}
	points, total := g.points()
	if n < 1 || n > len(points)+1 {
		return nil, fmt.Errorf("%d stages, want 1..%d, because the graph has %d cut points", n, len(points)+1, len(points))
	}
	var at []string
	next := 0
	for i := 1; i < n; i++ {
		last := len(points) - (n - i) // leaves a point for each later cut
		for next < last && points[next].work*n < total*i {
			next++
		}
		at = append(at, points[next].tensor)
		next++
	}
	return at, nil
}

// Cut splits m at the named cut points into len(at)+1 models. The names must be in the graph's
// order. Stage i computes the tensor at[i] from at[i−1] and the carried inputs. The first stage
// takes m's inputs, and the last returns m's outputs.
//
// A stage also outputs the carried inputs that later stages read, unchanged. So the outputs of one
// stage are the inputs of the next. Each stage has only the parameters that it uses. If a value
// depends only on carried inputs, each stage that needs the value computes it. The stages share
// memory with m.
//
// If m does not give a tensor's type, Cut assumes FP32. If the tensor has another type, ONNX
// Runtime refuses to load the stage.
func Cut(m *onnxpb.ModelProto, carried []string, at ...string) ([]*onnxpb.ModelProto, error) {
	g, err := open(m, carried)
	if err != nil {
		return nil, err
	}
	if err := g.follow(at); err != nil {
		return nil, err
	}
	all := slices.DeleteFunc(slices.Clone(m.GetGraph().GetInput()), func(in *onnxpb.ValueInfoProto) bool { return g.initial[in.GetName()] })
	carry := func(read map[string]bool) (out []*onnxpb.ValueInfoProto) {
		return slices.DeleteFunc(slices.Clone(all), func(in *onnxpb.ValueInfoProto) bool {
			return !read[in.GetName()] || !slices.Contains(carried, in.GetName())
		})
	}
	stages := make([]*onnxpb.ModelProto, len(at)+1)
	later := map[string]bool{} // inputs that later stages read
	for i := len(at); i >= 0; i-- {
		given, outputs := all, m.GetGraph().GetOutput()
		if i > 0 {
			given = slices.Concat([]*onnxpb.ValueInfoProto{g.info(at[i-1])}, all)
		}
		if i < len(at) {
			outputs = []*onnxpb.ValueInfoProto{g.info(at[i])}
		}
		part, reads, err := g.between(given, outputs)
		if err != nil {
			return nil, fmt.Errorf("stage %d of %d: %w", i+1, len(at)+1, err)
		}
		part.Name = proto.String(fmt.Sprintf("%s-%d", m.GetGraph().GetName(), i+1))
		part.Output = slices.Concat(outputs, carry(later))
		maps.Copy(later, reads)
		if part.Input = all; i > 0 {
			part.Input = slices.Concat(given[:1], carry(later))
		}
		stages[i] = &onnxpb.ModelProto{IrVersion: m.IrVersion, OpsetImport: m.GetOpsetImport(), Functions: m.GetFunctions(), Graph: part}
	}
	return stages, nil
}

// follow returns an error if a name is not a cut point after the previous one.
func (g *graph) follow(at []string) error {
	points, _ := g.points()
	for _, name := range at {
		i := slices.IndexFunc(points, func(p point) bool { return p.tensor == name })
		if i < 0 {
			return fmt.Errorf("cut at %q: it is no cut point after the previous one, want one of %s", name, some(points))
		}
		points = points[i+1:]
	}
	return nil
}

func some(points []point) string {
	var names []string
	for _, p := range points[:min(len(points), 10)] {
		names = append(names, p.tensor)
	}
	return fmt.Sprintf("%q (of %d)", names, len(points))
}
