package flow

import (
	"fmt"
	"math"
	"net/http"
	"strings"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// longest bounds lengths, so that they fit messages.
const longest = math.MaxInt32

// shown bounds how many items and tensors an error names.
const shown = 4

// measured returns the lengths of items. At least 1, because 0 means unknown. wrong says what was
// found if an item cannot be measured.
func measured(l pipeline.Length, items []tensor.Outline) (o origin, wrong string) {
	if len(items) != 1 {
		o.lengths = make([]int, len(items))
	}
	total := int64(0)
	for i := range items {
		n := int64(1) // an item
		switch l.Unit {
		case pipeline.LengthBytes:
			n = items[i].Bytes
		case pipeline.LengthTensor:
			var ok bool
			if n, ok = dimension(l, items[i].Tensors); !ok {
				return origin{}, fmt.Sprintf("item %d with %s", i, contents(&items[i]))
			}
		}
		n = min(n, longest)
		if o.lengths != nil {
			o.lengths[i] = max(1, int(n))
		}
		if l.Unit == pipeline.LengthTensor {
			total = max(total, n)
		} else {
			total = min(total+n, longest)
		}
	}
	o.length = max(1, int(total))
	return o, ""
}

// dimension returns the dimension of the tensor that a length names. ok is false if there is none.
func dimension(l pipeline.Length, tensors []tensor.Tensor) (n int64, ok bool) {
	for i := range tensors {
		if t := &tensors[i]; t.Name == l.Tensor && l.Dim < len(t.Shape) {
			return t.Shape[l.Dim], true
		}
	}
	return 0, false
}

// contents describes an item for errors.
func contents(o *tensor.Outline) string {
	if o.Tensors == nil {
		return fmt.Sprintf("%d bytes of type %.60q", o.Bytes, o.ContentType)
	}
	var all []string
	for i := range o.Tensors {
		if i == shown {
			all = append(all, fmt.Sprintf("%d more", len(o.Tensors)-shown))
			break
		}
		all = append(all, fmt.Sprintf("tensor %.60q of shape %.60s", o.Tensors[i].Name, fmt.Sprint(o.Tensors[i].Shape)))
	}
	if len(all) == 0 {
		return "no tensor"
	}
	return strings.Join(all, ", ")
}

// unmeasured returns the client's error for items whose length a stage must know.
func unmeasured(stage, where, found string, l pipeline.Length) *task.Error {
	want := l.Unit
	if l.Unit == pipeline.LengthTensor {
		want = fmt.Sprintf("tensor %q with a dimension %d", l.Tensor, l.Dim)
	}
	return &task.Error{Status: http.StatusBadRequest, Stage: stage, Cause: fmt.Sprintf("the length of its %s: got %s, want %s (annotation %slength)", where, found, want, pipeline.Prefix)}
}

// measureRequest measures a request's input if the entry stage names a length. If the input cannot
// be measured, the output of the entry is measured later. But if the entry needs the length itself,
// because max-length bounds one of its functions, measureRequest returns the client's error.
func measureRequest(e *Start, entry *pipeline.Stage) (o *origin, refused *task.Error) {
	l, _ := pipeline.ParseLength(entry.Length)
	if l.Unit == "" {
		return nil, nil
	}
	var all origin
	found := ""
	switch r := &e.Request; {
	case !r.Direct:
		all, found = measured(l, outlined(r.Input, e.Outlines))
	case l.Unit == pipeline.LengthTensor:
		found = "an HTTP request"
	case l.Unit == pipeline.LengthBytes && r.Body < 0:
		found = "a body without Content-Length"
	case l.Unit == pipeline.LengthBytes:
		all.length = int(max(1, min(r.Body, longest)))
	default:
		all.length = 1
	}
	switch {
	case found == "":
		return &all, nil
	case l.Unit != pipeline.LengthTensor || bounded(entry):
		return nil, unmeasured(entry.Name, "input", found, l)
	}
	return nil, nil
}

// bounded reports whether one of a stage's functions takes no inputs above a length.
func bounded(s *pipeline.Stage) bool {
	for i := range s.Variants {
		if s.Variants[i].MaxLength > 0 {
			return true
		}
	}
	return s.MaxLength > 0
}

// outlined returns outlines, or those of items without references.
func outlined(items tensor.Activation, outlines []tensor.Outline) []tensor.Outline {
	if outlines != nil || len(items) == 0 {
		return outlines
	}
	outlines = make([]tensor.Outline, len(items))
	for i := range items {
		outlines[i] = items[i].Outline()
	}
	return outlines
}

// measures reports whether the output of a call is measured: its stage names a length that its
// successors need, and its input had none.
func (w *walk) measures(k *call) bool {
	s := &w.graph.Stages[k.stage]
	return s.Length != "" && k.length == 0 && len(s.Next) > 0
}

// measures reports whether the outlines of a reply's output are needed.
func (c *Core) measures(r *task.Reply) bool {
	w := c.walks[r.Request]
	if w == nil || r.Code != task.OK || r.Task < 1 || int(r.Task) > len(w.calls) {
		return false
	}
	return w.measures(&w.calls[r.Task-1])
}

// produced returns the origin of the output of a call.
func (w *walk) produced(k *call, r *task.Reply, outlines []tensor.Outline) (o origin, refused *task.Error) {
	o.length = k.length // items inherit it
	if w.measures(k) {
		s := &w.graph.Stages[k.stage]
		l, _ := pipeline.ParseLength(s.Length)
		found := ""
		if o, found = measured(l, outlined(r.Output, outlines)); found != "" {
			return o, unmeasured(s.Name, "output", found, l)
		}
		w.unit = l.Unit
	}
	o.from = w.answering(k, r)
	return o, nil
}
