// Command wait is a stage that holds its slot for a drawn time and burns no processor: a stand-in for a device. On a machine
// with two cores it shows how queues and replicas behave when work is done elsewhere; it says nothing about how fast any
// real work is, and every figure made with it says so.
//
// Environment: wait_mean (default 200ms), wait_cv (coefficient of variation, default 0.5), wait_seed (default: chance).
package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// settings is what the environment says.
type settings struct {
	mean time.Duration
	cv   float64
	seed uint64
}

func parse(getenv func(string) string) (settings, error) {
	s := settings{mean: 200 * time.Millisecond, cv: 0.5, seed: rand.Uint64()}
	var err error
	if v := getenv("wait_mean"); v != "" {
		if s.mean, err = time.ParseDuration(v); err != nil || s.mean < 0 {
			return s, fmt.Errorf("wait_mean=%q, want a duration such as 200ms", v)
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
	return s, nil
}

// draw returns a lognormal time of the given mean and coefficient of variation: positive, skewed as service times are.
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
			return touch(rep.Model())
		},
		Infer: stage.Each(func(c *stage.Call) (tensor.Activation, error) {
			mu.Lock()
			d := draw(r, s.mean, s.cv)
			mu.Unlock()
			t := time.NewTimer(d)
			defer t.Stop()
			select {
			case <-t.C:
				text := fmt.Sprintf("waited %v in place of a device", d.Round(time.Millisecond))
				return tensor.Activation{{ContentType: "text/plain", Bytes: []byte(text)}}, nil
			case <-c.Context().Done():
				return nil, c.Context().Err()
			}
		}),
	})
}

// touch runs the model once on the smallest input, so that a replica's first answer includes its parameters. A replica
// without a model, or with one whose input is not a single FP32 tensor, has nothing to touch.
func touch(m *zygote.Session) error {
	if m == nil || len(m.Inputs()) != 1 || m.Inputs()[0].Datatype != "FP32" {
		return nil
	}
	in := m.Inputs()[0]
	shape := make([]int64, len(in.Shape))
	n := int64(1)
	for i, d := range in.Shape {
		if shape[i] = d; d < 0 {
			shape[i] = 1
			if i >= 2 { // height and width of an image: the smallest that convolutions with strides accept
				shape[i] = 48
			}
		}
		n *= shape[i]
	}
	_, err := m.Run([]tensor.Tensor{{Name: in.Name, Datatype: "FP32", Shape: shape, Data: make([]byte, 4*n)}})
	return err
}
