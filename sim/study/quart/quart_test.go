package quart

import (
	"errors"
	"io"
	"io/fs"
	"math"
	"os"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/sim"
	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// none has no files.
func none(string) (io.ReadCloser, error) { return nil, fs.ErrNotExist }

func TestStudiesAreValid(t *testing.T) {
	full, err := Full(none)
	if err != nil {
		t.Fatal(err)
	}
	quick := Quick()
	for _, s := range []*study.Study{&full, &quick} {
		if err := s.Check(); err != nil {
			t.Error(err)
		}
	}
	if n := len(full.LeftOut); n != len(traces())+1 {
		t.Errorf("%d settings left out without data, want every trace and azure-functions: %v", n, full.LeftOut)
	}
	broken := func(string) (io.ReadCloser, error) { return nil, os.ErrPermission }
	if _, err := Full(broken); !errors.Is(err, os.ErrPermission) {
		t.Errorf("a trace that cannot be read: %v, want the cause", err)
	}
}

// TestModels holds every model to the load, the cluster and the sizes that it is said to have.
func TestModels(t *testing.T) {
	for _, m := range append(Models(), bert5()) {
		s := m.scenario(m.Name, renewal(m.Rate(), 1))
		var busy float64
		var sum time.Duration
		for _, st := range s.Stages {
			mean := st.Service.Profile[0].Mean // declared cores, no batch
			sum += mean
			busy += m.Rate() * mean.Seconds()
			for _, start := range []sim.Start{plainStart(st.Parameters), keptStart(st.Parameters)} {
				if !(start.Parked < start.Fork && start.Fork < start.Cold) || start.Fork <= 0 {
					t.Errorf("%s: starts %+v, want parked < fork < cold", m.Name, start)
				}
			}
			if a, b := plainStart(st.Parameters), keptStart(st.Parameters); a.Cold != b.Cold {
				t.Errorf("%s: from disk %v and %v, want the same of all", m.Name, a.Cold, b.Cold)
			}
		}
		if math.Abs(busy-work) > 1e-3 || (sum-m.Time).Abs() > time.Microsecond {
			t.Errorf("%s: %g GPUs of work, %v of service; want %d, %v", m.Name, busy, sum, work, m.Time)
		}
		w := whole(s)
		if one := w.Stages[0]; (one.Service.Profile[0].Mean-sum).Abs() > 0 || one.GPU*w.Budget > gpus || len(w.Stages) != 1 {
			t.Errorf("%s as a whole: %+v, want the stages' time", m.Name, one)
		}
	}
}

func TestWholeModelsHaveTheirGPUs(t *testing.T) {
	want := map[string]int{bert: 1, llama: 1, whisper: 1, opt: 3, resnet: 1}
	for _, m := range Models() {
		if got := whole(m.scenario(m.Name, renewal(1, 1))).Stages[0].GPU; got != want[m.Name] {
			t.Errorf("%s: %d GPUs, want %d", m.Name, got, want[m.Name])
		}
	}
}

// TestMoreCores is section 3.4's: four cores take 33 % less than two.
func TestMoreCores(t *testing.T) {
	if got := quota(4) / quota(2); math.Abs(got-0.67) > 1e-9 || quota(cores) != 1 {
		t.Errorf("four cores take %g of two, want 0.67; %g of what is declared, want 1", got, quota(cores))
	}
}

// TestContenders simulates half a minute of every contender, with its defaults and with another configuration: its plans are valid, it
// has an answer to everything, and it answers requests.
func TestContenders(t *testing.T) {
	for _, c := range contenders() {
		x := gammaSetting(Models()[0], 4)
		if c.In != nil && !c.In(x) {
			x = observations()[0]
			if !c.In(x) {
				x = observations()[3]
			}
		}
		for i, knobs := range c.Candidates(2) {
			s := x.Scenario(false)
			s.Warmup, s.Duration = 0, 30*time.Second
			m, err := c.Apply(s, knobs).Model(none)
			if err != nil {
				t.Fatalf("%s: %v", c.Name, err)
			}
			f, err := m.One(t.Context(), 0, 7)
			if err != nil {
				t.Fatalf("%s: %v", c.Name, err)
			}
			p := &f.Pipelines[0]
			if f.Refused+f.Held > 0 || p.Answered < p.Offered/4 {
				t.Errorf("%s, candidate %d %v: %g plans refused, %g domains held (%s), %g of %g requests answered", c.Name, i, knobs, f.Refused, f.Held, f.Complaint, p.Answered, p.Offered)
			}
			if f.DeviceSeconds > gpus*f.Seconds*1.001 {
				t.Errorf("%s: %g GPU-seconds, want at most all", c.Name, f.DeviceSeconds)
			}
			t.Logf("%-14s %v: mean %.0f ms, %.1f GPUs, %.4f failed", c.Name, knobs, p.Mean*1e3, f.DeviceSeconds/f.Seconds, p.Failed/p.Offered)
		}
	}
}
