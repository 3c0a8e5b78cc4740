package onnx

import (
	"fmt"
	"maps"

	"github.com/stagecoach-serving/stagecoach/third_party/onnx/onnxpb"
)

// CutPoints returns, in order, the names of the tensors at which m can be cut in two: after the node that makes the tensor,
// nothing else that depends on the input is still needed. m has one input.
func CutPoints(m *onnxpb.ModelProto) ([]string, error) {
	g := m.GetGraph()
	if len(g.GetInput()) != 1 || len(g.GetOutput()) != 1 {
		return nil, fmt.Errorf("model has %d inputs and %d outputs, want one of each", len(g.GetInput()), len(g.GetOutput()))
	}
	constant := map[string]bool{} // what depends on no input
	for _, t := range g.GetInitializer() {
		constant[t.GetName()] = true
	}
	lastUse := map[string]int{}
	for i, n := range g.GetNode() {
		fixed := true
		for _, in := range n.GetInput() {
			lastUse[in] = i
			fixed = fixed && (in == "" || constant[in])
		}
		if fixed {
			for _, out := range n.GetOutput() {
				constant[out] = true
			}
		}
	}
	var cuts []string
	live := map[string]bool{g.GetInput()[0].GetName(): true}
	for i, n := range g.GetNode() {
		for _, out := range n.GetOutput() {
			if !constant[out] && lastUse[out] > i {
				live[out] = true
			}
		}
		maps.DeleteFunc(live, func(t string, _ bool) bool { return lastUse[t] <= i })
		if len(live) != 1 {
			continue
		}
		for t := range live { // the only one
			if t != g.GetInput()[0].GetName() && (len(cuts) == 0 || cuts[len(cuts)-1] != t) {
				cuts = append(cuts, t)
			}
		}
	}
	return cuts, nil
}

// Cut splits m at the named tensors, which are cut points in order, into len(at)+1 models: the first has m's input, the last
// its output, and each tensor in between is the output of one and the input of the next. Each stage has the parameters that
// it uses, and no others.
func Cut(m *onnxpb.ModelProto, at ...string) ([]*onnxpb.ModelProto, error) {
	g := m.GetGraph()
	if len(g.GetInput()) != 1 || len(g.GetOutput()) != 1 {
		return nil, fmt.Errorf("model has %d inputs and %d outputs, want one of each", len(g.GetInput()), len(g.GetOutput()))
	}
	known := map[string]*onnxpb.ValueInfoProto{}
	for _, v := range g.GetValueInfo() {
		known[v.GetName()] = v
	}
	var stages []*onnxpb.ModelProto
	in := g.GetInput()[0]
	for i := range len(at) + 1 {
		out := g.GetOutput()[0]
		if i < len(at) {
			if out = known[at[i]]; out == nil {
				out = floats(at[i], nil)
			}
		}
		sub, err := between(g, in, out)
		if err != nil {
			return nil, fmt.Errorf("stage %d of %d: %w", i+1, len(at)+1, err)
		}
		stages = append(stages, &onnxpb.ModelProto{IrVersion: m.IrVersion, OpsetImport: m.GetOpsetImport(), Graph: sub})
		in = out
	}
	return stages, nil
}

// between returns the part of g that computes out from in.
func between(g *onnxpb.GraphProto, in, out *onnxpb.ValueInfoProto) (*onnxpb.GraphProto, error) {
	producer := map[string]int{}
	for i, n := range g.GetNode() {
		for _, o := range n.GetOutput() {
			producer[o] = i
		}
	}
	parameters := map[string]bool{}
	for _, t := range g.GetInitializer() {
		parameters[t.GetName()] = true
	}
	nodes, used := map[int]bool{}, map[string]bool{}
	for todo := []string{out.GetName()}; len(todo) > 0; {
		name := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		if name == "" || name == in.GetName() {
			continue
		}
		if parameters[name] {
			used[name] = true
			continue
		}
		i, ok := producer[name]
		if !ok {
			return nil, fmt.Errorf("tensor %q is needed and comes from before %q: that is no cut point", name, in.GetName())
		}
		if !nodes[i] {
			nodes[i] = true
			todo = append(todo, g.GetNode()[i].GetInput()...)
		}
	}
	sub := &onnxpb.GraphProto{Name: g.Name, Input: []*onnxpb.ValueInfoProto{in}, Output: []*onnxpb.ValueInfoProto{out}}
	for i, n := range g.GetNode() {
		if nodes[i] {
			sub.Node = append(sub.Node, n)
		}
	}
	for _, t := range g.GetInitializer() {
		if used[t.GetName()] {
			sub.Initializer = append(sub.Initializer, t)
		}
	}
	return sub, nil
}
