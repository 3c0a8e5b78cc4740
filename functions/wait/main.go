// Command wait is a stage that holds its slot for a random time and uses no processor, as if a
// device did the work. It shows how queues and replicas behave on a small machine. It says nothing
// about the speed of real work, and every figure measured with it must say so. If the function has
// a model, each replica computes once on a small input before it is ready. So the start of a
// replica costs what the start of a real stage costs.
//
// Environment:
//
//   - wait_mean: the mean time of a call that runs alone (default 200ms)
//   - wait_cv: its coefficient of variation (default 0.5)
//   - wait_batch_cost: a batch of b calls takes 1 + wait_batch_cost·(b − 1) times as long (default
//     1)
//   - wait_items: numbers of items, with commas between; each answer has one of them, drawn at
//     random (default 1)
//   - wait_seed: of the random numbers (default: random)
//   - wait_stubborn: true: a call continues after it was canceled, like a handler that ignores its
//     context (default false)
package main

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// settings has the values from the environment.
type settings struct {
	mean     time.Duration
	cv       float64
	cost     float64 // of each further call of a batch, in shares of the time of the first
	items    []int
	seed     uint64
	stubborn bool // continue calls that were canceled
}

const (
	mostTogether = 64 // calls of a batch
	mostItems    = 1000
)

func parse(getenv func(string) string) (settings, error) {
	s := settings{mean: 200 * time.Millisecond, cv: 0.5, cost: 1, items: []int{1}, seed: rand.Uint64()}
	var err error
	if v := getenv("wait_mean"); v != "" {
		if s.mean, err = time.ParseDuration(v); err != nil || s.mean < 0 || s.mean > time.Hour {
			return s, fmt.Errorf("wait_mean=%q, want a duration such as 200ms, at most 1h", v)
		}
	}
	if v := getenv("wait_cv"); v != "" {
		if s.cv, err = strconv.ParseFloat(v, 64); err != nil || s.cv < 0 || s.cv > 10 {
			return s, fmt.Errorf("wait_cv=%q, want 0 to 10", v)
		}
	}
	if v := getenv("wait_batch_cost"); v != "" {
		if s.cost, err = strconv.ParseFloat(v, 64); err != nil || s.cost < 0 || s.cost > 10 {
			return s, fmt.Errorf("wait_batch_cost=%q, want 0 to 10", v)
		}
	}
	if v := getenv("wait_items"); v != "" {
		if s.items, err = counts(v); err != nil {
			return s, err
		}
	}
	if v := getenv("wait_seed"); v != "" {
		if s.seed, err = strconv.ParseUint(v, 10, 64); err != nil {
			return s, fmt.Errorf("wait_seed=%q, want a number", v)
		}
	}
	switch v := getenv("wait_stubborn"); v {
	case "", "false":
	case "true":
		s.stubborn = true
	default:
		return s, fmt.Errorf("wait_stubborn=%q, want true or false", v)
	}
	return s, nil
}

func counts(v string) (out []int, err error) {
	for text := range strings.SplitSeq(v, ",") {
		n, err := strconv.Atoi(strings.TrimSpace(text))
		if err != nil || n < 0 || n > mostItems {
			return nil, fmt.Errorf("wait_items=%q, want numbers from 0 to %d with commas between, such as 0,2,4", v, mostItems)
		}
		out = append(out, n)
	}
	return out, nil
}

// draw returns a lognormal time with the given mean and coefficient of variation. It is positive
// and skewed, as service times are.
func draw(r *rand.Rand, mean time.Duration, cv float64) time.Duration {
	variance := math.Log(1 + cv*cv)
	return time.Duration(float64(mean) * math.Exp(r.NormFloat64()*math.Sqrt(variance)-variance/2))
}

func main() {
	var (
		s  settings
		mu sync.Mutex
		r  *rand.Rand
	)
	stage.Main(stage.Hooks{
		Place: func(_ context.Context, rep *stage.Replica) (err error) {
			if s, err = parse(os.Getenv); err != nil {
				return err
			}
			r = rand.New(rand.NewPCG(s.seed, 0))
			if m := rep.Model(); m != nil {
				touch(m, rep.Log)
			}
			return nil
		},
		MaxBatch: mostTogether,
		Infer: func(ctx context.Context, calls []*stage.Call) []stage.Result {
			mu.Lock()
			d := time.Duration(float64(draw(r, s.mean, s.cv)) * (1 + s.cost*float64(len(calls)-1)))
			answers := make([]tensor.Activation, len(calls))
			for i := range answers {
				answers[i] = answer(d, s.items[r.IntN(len(s.items))])
			}
			mu.Unlock()
			t := time.NewTimer(d)
			defer t.Stop()
			over := ctx.Done()
			if s.stubborn {
				over = nil
			}
			select {
			case <-t.C:
			case <-over:
			}
			out := make([]stage.Result, len(calls))
			for i, c := range calls {
				if out[i].Output = answers[i]; !s.stubborn {
					out[i].Err = c.Context().Err()
				}
			}
			return out
		},
	})
}

// answer returns n items that say how long the batch waited.
func answer(d time.Duration, n int) tensor.Activation {
	out := make(tensor.Activation, n)
	for i := range out {
		out[i] = tensor.Item{ContentType: "text/plain", Bytes: fmt.Appendf(nil, "waited %v in place of a device", d.Round(time.Millisecond))}
	}
	return out
}

// touch runs the model once on a small input of zeros, so that the parameters are in memory before
// the first call. If the model takes no such input, touch only logs that.
func touch(m *zygote.Session, log *slog.Logger) {
	inputs := m.Inputs()
	if len(inputs) != 1 {
		log.Info("the model did not run before the first call: it has several inputs", "inputs", len(inputs))
		return
	}
	in, ok := smallest(inputs[0])
	if !ok {
		log.Info("the model did not run before the first call: it takes no known small input", "input", inputs[0].Name, "wants", inputs[0].String())
		return
	}
	if _, err := m.Run([]tensor.Tensor{in}); err != nil {
		log.Warn("the model failed before the first call", "error", err)
	}
}

// smallest returns a small input of zeros for an FP32 input of the model. A free dimension is 1,
// except that a free height or width of an image is 64, which most models can halve often enough.
// smallest returns false for other datatypes, for an unknown shape, and if the input would need
// more than 64 MiB.
func smallest(in zygote.Info) (tensor.Tensor, bool) {
	t := tensor.Tensor{Name: in.Name, Datatype: in.Datatype, Shape: slices.Clone(in.Shape)}
	n := int64(4)
	for i, d := range t.Shape {
		switch {
		case d < 0 && i >= 2 && len(t.Shape) == 4:
			t.Shape[i] = 64
		case d < 0:
			t.Shape[i] = 1
		}
		if t.Shape[i] > 64<<20 {
			return t, false
		}
		if n *= t.Shape[i]; n == 0 || n > 64<<20 {
			return t, false
		}
	}
	t.Data = make([]byte, n)
	return t, in.Datatype == "FP32" && in.Shape != nil
}
