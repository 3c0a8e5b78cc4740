package conformance

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

const (
	envProgram = "CONFORMANCE_PROGRAM"
	maxBatch   = 4
)

func TestMain(m *testing.M) {
	if hooks, ok := programs()[os.Getenv(envProgram)]; ok {
		stage.Main(hooks)
	}
	goleak.VerifyTestMain(m)
}

// programs returns the test stages. testdata/handler.py has the same stages.
func programs() map[string]stage.Hooks {
	return map[string]stage.Hooks{
		"each":     {Infer: stage.Each((&program{}).call), MaxBatch: maxBatch},
		"noop":     {Infer: noop, MaxBatch: 64},
		"few":      {Infer: func(context.Context, []*stage.Call) []stage.Result { return make([]stage.Result, 1) }, MaxBatch: maxBatch},
		"broken":   {Infer: broken, MaxBatch: maxBatch},
		"unplaced": {Infer: noop, Place: func(context.Context, *stage.Replica) error { return errors.New("no device of 3 GiB, want one") }},
		"crowded": {Infer: noop, Place: func(context.Context, *stage.Replica) error {
			return stage.OutOfMemory(errors.New("want 3 GiB, 1 GiB is free"))
		}},
		"hookless": {},
	}
}

// broken panics for a batch with a call "b".
func broken(ctx context.Context, calls []*stage.Call) []stage.Result {
	if slices.ContainsFunc(calls, func(c *stage.Call) bool { return string(c.Items()[0].Bytes) == "b" }) {
		panic("ouch")
	}
	return noop(ctx, calls)
}

func noop(_ context.Context, calls []*stage.Call) []stage.Result {
	out := make([]stage.Result, len(calls))
	for i, c := range calls {
		out[i].Output = c.Items()
	}
	return out
}

// program is a stage whose calls say in their text what it does.
type program struct{ kept *stage.Call }

func (p *program) call(c *stage.Call) (tensor.Activation, error) {
	if it := c.Items()[0]; it.Tensors != nil {
		return tensor.Activation{it}, nil
	}
	text := string(c.Items()[0].Bytes)
	switch {
	case text == "bad":
		return nil, stage.BadInput(errors.New("got bad, want good"))
	case text == "fail":
		return nil, errors.New("broken")
	case text == "crowded":
		return nil, stage.OutOfMemory(errors.New("want 2 GiB, 1 GiB is free"))
	case text == "panic":
		panic("ouch")
	case text == "large":
		return tensor.Activation{{ContentType: "x/y", Bytes: bytes.Repeat([]byte("L"), 1<<20)}, {Bytes: []byte("small")}}, nil
	case text == "many":
		out := make(tensor.Activation, 70)
		for i := range out {
			out[i].Bytes = bytes.Repeat([]byte{byte(i)}, tensor.InlineLimit+1)
		}
		return out, nil
	case text == "flood": // inline, and more than a socket's buffer holds
		out := make(tensor.Activation, 200)
		for i := range out {
			out[i].Bytes = make([]byte, tensor.InlineLimit)
		}
		return out, nil
	case text == "wait":
		<-c.Context().Done()
		return nil, c.Context().Err()
	case text == "nothing":
		return nil, nil
	case text == "stream":
		_, err := c.Write([]byte("0123456789"))
		return nil, err
	case text == "pour":
		_, err := c.Write(make([]byte, 1<<20))
		return nil, err
	case text == "keep":
		p.kept = c
		return nil, nil
	case text == "late":
		_, err := p.kept.Write([]byte("late"))
		if errors.Is(err, context.Canceled) {
			err = errors.New("canceled")
		}
		return tensor.Activation{{Bytes: fmt.Append(nil, err)}}, nil
	case text == "sizes":
		var n []byte
		for _, it := range c.Items() {
			n = fmt.Appendf(n, "%s %d ", it.ContentType, len(it.Bytes))
		}
		return tensor.Activation{{Bytes: n}}, nil
	case text == "show":
		return tensor.Activation{{ContentType: "text/plain", Bytes: show(c)}}, nil
	case strings.HasPrefix(text, "env "):
		return tensor.Activation{{Bytes: []byte(os.Getenv(text[4:]))}}, nil
	}
	return tensor.Activation{{ContentType: "text/plain", Bytes: bytes.ToUpper([]byte(text))}}, nil
}

// show returns a text with all fields of a call.
func show(c *stage.Call) []byte {
	out := fmt.Appendf(nil, "%s %d %d|%s|", c.Key.Request, c.Key.Task, c.Key.Attempt, c.Traceparent)
	if !c.Deadline.IsZero() {
		out = fmt.Append(out, c.Deadline.Round(time.Millisecond).UnixMilli())
	}
	for _, h := range c.Header {
		out = fmt.Appendf(out, "|%s=%s", h.Name, h.Value)
	}
	for _, p := range c.Input {
		kinds := make([]string, 0, len(p.Items))
		for _, it := range p.Items {
			kinds = append(kinds, fmt.Sprint(it.ContentType, len(it.Bytes), len(it.Tensors)))
		}
		slices.Sort(kinds)
		out = fmt.Appendf(out, "|%s:%s", p.From, strings.Join(kinds, ","))
	}
	return out
}
