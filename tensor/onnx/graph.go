package onnx

import (
	"fmt"
	"maps"
	"slices"

	"github.com/stagecoach-serving/stagecoach/internal/third_party/onnx/onnxpb"
)

// graph is the structure of a model's graph that cutting needs.
type graph struct {
	proto *onnxpb.GraphProto
	nodes []*onnxpb.NodeProto // in topological order, as ONNX demands
	// Per node: the tensors that it reads, also within its subgraphs.
	uses            [][]string
	inputs, outputs []string        // without carried inputs and those with an initializer
	initial         map[string]bool // tensors with an initializer
	constant        map[string]bool // tensors that depend on no input, or only on carried ones
	producer        map[string]int  // the node that computes a tensor
	// The last node that reads a tensor; the number of nodes for outputs.
	last map[string]int
}

// analyse returns the structure of a graph. Each stage gets the carried inputs in addition to the
// tensor at which the graph is cut.
func analyse(p *onnxpb.GraphProto, carried []string) *graph {
	g := &graph{
		proto: p, nodes: p.GetNode(),
		initial: initializers(p), constant: map[string]bool{}, producer: map[string]int{}, last: map[string]int{},
	}
	for name := range g.initial {
		g.constant[name] = true
	}
	for _, in := range p.GetInput() {
		switch name := in.GetName(); {
		case slices.Contains(carried, name):
			g.constant[name] = true
		case !g.initial[name]:
			g.inputs = append(g.inputs, name)
			g.last[name] = -1
		}
	}
	for i, n := range g.nodes {
		uses := reads(n)
		g.uses = append(g.uses, uses)
		constant := true
		for _, name := range uses {
			g.last[name] = i
			constant = constant && g.constant[name]
		}
		for _, name := range n.GetOutput() {
			g.producer[name] = i
			g.constant[name] = constant
		}
	}
	for _, out := range p.GetOutput() {
		g.outputs = append(g.outputs, out.GetName())
		g.last[out.GetName()] = len(g.nodes)
	}
	return g
}

// points returns the tensors at which the graph can be cut, and the work of the whole graph.
func (g *graph) points() (points []point, total int) {
	live := map[string]bool{} // tensors that depend on an input and are needed later
	for _, name := range g.inputs {
		if g.last[name] >= 0 {
			live[name] = true
		}
	}
	for i, n := range g.nodes {
		total += work(n)
		for _, name := range n.GetOutput() {
			if name != "" && !g.constant[name] && g.last[name] > i {
				live[name] = true
			}
		}
		maps.DeleteFunc(live, func(name string, _ bool) bool { return g.last[name] <= i })
		if len(live) != 1 {
			continue
		}
		for name := range live { // it has one element
			known := len(points) > 0 && points[len(points)-1].tensor == name
			if !known && !slices.Contains(g.inputs, name) && !slices.Contains(g.outputs, name) {
				points = append(points, point{tensor: name, work: total})
			}
		}
	}
	return points, total
}

// work returns 1 for a node with a high cost: a matrix product, a convolution or a recurrence.
func work(n *onnxpb.NodeProto) int {
	switch n.GetOpType() {
	case "MatMul", "Gemm", "Conv", "ConvTranspose", "LSTM", "GRU", "RNN", "Attention", "Einsum":
		return 1
	}
	return 0
}

func initializers(p *onnxpb.GraphProto) map[string]bool {
	all := map[string]bool{}
	for _, t := range p.GetInitializer() {
		all[t.GetName()] = true
	}
	for _, t := range p.GetSparseInitializer() {
		all[t.GetValues().GetName()] = true
	}
	return all
}

// reads returns the tensors that a node reads: its inputs, and the outer tensors that its subgraphs
// (of If, Loop, Scan) read.
func reads(n *onnxpb.NodeProto) []string {
	var names []string
	for _, name := range n.GetInput() {
		if name != "" {
			names = append(names, name)
		}
	}
	for _, a := range n.GetAttribute() {
		names = append(names, free(a.GetG())...)
		for _, sub := range a.GetGraphs() {
			names = append(names, free(sub)...)
		}
	}
	return names
}

// free returns the tensors that a subgraph reads and does not define.
func free(p *onnxpb.GraphProto) []string {
	own := initializers(p)
	for _, in := range p.GetInput() {
		own[in.GetName()] = true
	}
	var names []string
	for _, n := range p.GetNode() {
		for _, name := range reads(n) {
			if !own[name] {
				names = append(names, name)
			}
		}
		for _, name := range n.GetOutput() {
			own[name] = true
		}
	}
	for _, out := range p.GetOutput() {
		if !own[out.GetName()] {
			names = append(names, out.GetName())
		}
	}
	return names
}

// info returns the model's description of an inner tensor, or else FP32 of unknown shape.
func (g *graph) info(name string) *onnxpb.ValueInfoProto {
	for _, v := range g.proto.GetValueInfo() {
		if v.GetName() == name && v.GetType() != nil {
			return v
		}
	}
	return value(name, onnxpb.TensorProto_FLOAT, nil)
}

// between returns the part of the graph that computes outputs from inputs, and the inputs that this
// part reads. The caller sets the inputs and outputs of the part.
func (g *graph) between(inputs, outputs []*onnxpb.ValueInfoProto) (part *onnxpb.GraphProto, reads map[string]bool, err error) {
	given, needed, weights := map[string]bool{}, map[int]bool{}, map[string]bool{}
	reads = map[string]bool{}
	for _, in := range inputs {
		given[in.GetName()] = true
	}
	var want []string
	for _, out := range outputs {
		want = append(want, out.GetName())
	}
	for len(want) > 0 {
		name := want[len(want)-1]
		want = want[:len(want)-1]
		if given[name] {
			reads[name] = true
			continue
		}
		if g.initial[name] {
			weights[name] = true
			continue
		}
		i, ok := g.producer[name]
		if !ok {
			return nil, nil, fmt.Errorf("tensor %q has no source, want a node, an initializer or an input of that name", name)
		}
		if !needed[i] {
			needed[i] = true
			want = append(want, g.uses[i]...)
		}
	}
	part = &onnxpb.GraphProto{}
	for i, n := range g.nodes {
		if needed[i] {
			part.Node = append(part.Node, n)
		}
	}
	for _, t := range g.proto.GetInitializer() {
		if weights[t.GetName()] {
			part.Initializer = append(part.Initializer, t)
		}
	}
	for _, t := range g.proto.GetSparseInitializer() {
		if weights[t.GetValues().GetName()] {
			part.SparseInitializer = append(part.SparseInitializer, t)
		}
	}
	return part, reads, nil
}
