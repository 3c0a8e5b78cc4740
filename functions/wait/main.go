// Command wait is a stage that holds its slot for a drawn time and burns no processor: a stand-in
// for a device. On a machine with two cores it shows how queues and replicas behave when work is
// done elsewhere; it says nothing about how fast any real work is, and every figure made with it
// says so. With a model, a replica computes once on a small input before it is ready, so that what
// starts is as heavy as what it stands for.
//
// Environment: wait_mean (default 200ms), wait_cv (coefficient of variation, default 0.5),
// wait_seed (default: random), wait_stubborn (true: it goes on when its call is over, like a
// handler that ignores its context; default false).
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
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// settings is what the environment says.
type settings struct {
	mean     time.Duration
	cv       float64
	seed     uint64
	stubborn bool // it goes on with calls that are over
}

func parse(getenv func(string) string) (settings, error) {
	s := settings{mean: 200 * time.Millisecond, cv: 0.5, seed: rand.Uint64()}
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

// draw returns a lognormal time of the given mean and coefficient of variation: positive, skewed as
// service times are.
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
		Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) {
			mu.Lock()
			d := draw(r, s.mean, s.cv)
			mu.Unlock()
			t := time.NewTimer(d)
			defer t.Stop()
			over := c.Context().Done()
			if s.stubborn {
				over = nil
			}
			select {
			case <-t.C:
				text := fmt.Sprintf("waited %v in place of a device", d.Round(time.Millisecond))
				return tensor.Activation{{ContentType: "text/plain", Bytes: []byte(text)}}, nil
			case <-over:
				return nil, c.Context().Err()
			}
		}),
	})
}

// touch runs the model once on a small input of zeros, so that a replica's first answer includes
// its parameters. A model that takes no such input is left alone.
func touch(m *zygote.Session, log *slog.Logger) {
	inputs := m.Inputs()
	if len(inputs) != 1 {
		log.Info("the model is not touched: it has several inputs", "inputs", len(inputs))
		return
	}
	in, ok := smallest(inputs[0])
	if !ok {
		log.Info("the model is not touched: no small input is known", "input", inputs[0].Name, "wants", inputs[0].String())
		return
	}
	if _, err := m.Run([]tensor.Tensor{in}); err != nil {
		log.Warn("the model is not touched", "error", err)
	}
}

// smallest returns zeros for an input of FP32: 1 for a free dimension, but 64 for the height and
// width of an image, which halves evenly as often as most models do. It is false for other
// datatypes, an unknown shape, and above 64 MiB.
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
