package recorded

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/sim"
)

// unknownService is the service time of a stage that has never answered.
const unknownService = time.Millisecond

// addStages adds the stages of the chosen pipelines, in their order, with their variants.
func (c *conversion) addStages() {
	done := map[string]bool{}
	for _, p := range c.chosen {
		for _, key := range p.Stages {
			if done[key] {
				continue
			}
			done[key] = true
			c.run.Scenario.Stages = append(c.run.Scenario.Stages, c.stage(key))
		}
	}
}

// stage returns a stage with its variants.
func (c *conversion) stage(key string) sim.Stage {
	s := sim.Stage{Variant: c.variant(key)}
	for _, p := range c.chosen {
		at := slices.Index(p.Stages, key)
		if at < 0 {
			continue
		}
		s.Pipelines = append(s.Pipelines, c.named(p.Name))
		for _, e := range p.Edges {
			if to := c.named(p.Stages[e.To]); e.From == at && !slices.Contains(s.Next, to) {
				s.Next = append(s.Next, to)
			}
			s.Each = s.Each || e.To == at && e.Each
		}
	}
	for _, name := range names(c.functions) {
		if c.functions[name].VariantOf == key {
			s.Variants = append(s.Variants, c.variant(name))
		}
	}
	if slices.ContainsFunc(s.Variants, func(v sim.Variant) bool { return v.MaxLength != s.MaxLength }) {
		c.lengths(key)
	}
	return s
}

// variant returns a function with its measurements.
func (c *conversion) variant(key string) sim.Variant {
	f := c.functions[key]
	v := sim.Variant{
		Name: c.named(key), Slots: max(f.Slots, 1), Min: f.Min, Max: f.Max, Zero: f.Zero, ZeroAge: f.ZeroAge,
		CPU: sim.Milli(f.CPUMilli), CPULimit: sim.Milli(f.CPULimit), Memory: sim.Bytes(f.Memory),
		GPU: f.GPU, GPUMemory: sim.Bytes(f.DeviceMemory), Accuracy: f.Accuracy, MaxLength: f.MaxLength,
	}
	v.Batch = max(f.Batch, 1)
	v.Service = c.service(f)
	if f.AutoBatch > 0 && len(v.Service.Profile) > 0 {
		v.AutoBatch, v.Batch = true, f.AutoBatch
	}
	if f.items.n > 0 {
		v.Outputs = items(f.items.mean())
	}
	c.starts(f, &v)
	return v
}

// service returns the service times of a function: its profile, or else the times that were
// measured in the record, or else those that were learned.
func (c *conversion) service(f *function) sim.Service {
	s := sim.Service{Dist: sim.Lognormal, Profile: slowest(f.Profile)}
	if len(s.Profile) > 0 {
		return s
	}
	mean, cv := f.service.mean()
	switch {
	case f.service.calls.n > 0:
	case f.Learned.Known:
		mean, cv = f.Learned.Mean.Seconds(), f.Learned.CV
		c.note("%s: no service time was measured in this time; the learned one is taken.", c.named(f.Name))
	default:
		mean, cv = unknownService.Seconds(), 1
		c.note("%s has never answered: its service time is unknown, %v is taken.", c.named(f.Name), unknownService)
	}
	s.Mean = max(seconds(mean), time.Microsecond)
	s.CV = pointer(round(min(cv, 30)))
	if cost, ok := f.service.batchCost(); ok {
		s.BatchCost = pointer(round(cost))
	}
	return s
}

// slowest returns a profile's points. Of several lengths, the slowest counts, as in plan.
func slowest(all []plan.Point) (out []sim.Point) {
	for _, p := range all {
		is := sim.Point{CPU: sim.Milli(p.CPUMilli), Batch: p.Batch, Mean: p.Mean, CV: round(p.CV)}
		i := slices.IndexFunc(out, func(x sim.Point) bool { return x.CPU == is.CPU && x.Batch == is.Batch })
		switch {
		case i < 0:
			out = append(out, is)
		case out[i].Mean < is.Mean:
			out[i] = is
		}
	}
	return out
}

// mean returns the mean time of a batch of one call, in seconds, and the CV of times.
func (s *service) mean() (mean, cv float64) {
	mean = s.calls.mean()
	cv = math.Sqrt(s.calls.variance()) / max(mean, 1e-12)
	if first, slope, ok := s.line(); ok {
		mean = first + slope
	}
	return mean, cv
}

// batchCost returns what each further call adds to a batch, as a part of the first call's time.
func (s *service) batchCost() (float64, bool) {
	first, slope, ok := s.line()
	if !ok {
		return 0, false
	}
	return max(slope, 0) / (first + slope), true
}

// line returns the line first + slope·size through the times of batches, by least squares. ok is
// false if batches had one size only.
func (s *service) line() (first, slope float64, ok bool) {
	var n, x, y, xx, xy float64
	for size, w := range s.sizes {
		b := float64(size)
		n, x, y, xx, xy = n+w.n, x+w.n*b, y+w.sum, xx+w.n*b*b, xy+b*w.sum
	}
	spread := n*xx - x*x
	if len(s.sizes) < 2 || spread <= 1e-9*n*xx {
		return 0, 0, false
	}
	slope = max((n*xy-x*y)/spread, 0)
	first = (y - slope*x) / n
	if first < 0 {
		first, slope = 0, y/x
	}
	return first, slope, first+slope > 0
}

// mostItems bounds the items per answer, as a scenario does.
const mostItems = 10_000

// items returns the numbers of items per answer, whole numbers around their mean.
func items(mean float64) sim.Length {
	if math.Abs(mean-math.Round(mean)) < 0.05 && mean > 0.5 {
		if mean < 1.5 {
			return sim.Length{}
		}
		return sim.Length{Constant: int(math.Round(mean))}
	}
	const parts = 10
	mean = min(max(mean, 0), mostItems)
	low := int(math.Floor(mean))
	more := int(math.Round((mean - float64(low)) * parts))
	var out sim.Length
	for i := range parts {
		if i < more {
			out.List = append(out.List, low+1)
		} else {
			out.List = append(out.List, low)
		}
	}
	return out
}

// starts sets how long starts take, by the paths that were measured.
func (c *conversion) starts(f *function, v *sim.Variant) {
	took := func(paths ...string) time.Duration {
		for _, path := range paths {
			for _, s := range f.starts {
				if s.Path == path && s.N > 0 {
					return s.Mean.Round(time.Microsecond)
				}
			}
		}
		return 0
	}
	v.Start = sim.Start{Cold: took("cold", "process"), Fork: took("fork", "resident"), Parked: took("parked")}
	if v.GPU == 0 {
		v.Start.Parked = 0
	}
	v.Parameters = sim.Bytes(c.zygotes[f.Name])
	s := &v.Start
	switch {
	case s.Cold == 0 && s.Fork == 0 && s.Parked == 0:
		c.note("%s: no start was measured; in the simulation its replicas start at once.", v.Name)
	case s.Cold == 0:
		s.Cold = max(s.Fork, s.Parked)
		c.note("%s: no cold start was measured; one counts as long as the longest measured start.", v.Name)
	case v.Parameters == 0 && cmp.Or(s.Fork, s.Parked) != 0:
		c.note("%s: the size of its parameters is unknown; all its starts count as cold ones.", v.Name)
		s.Fork, s.Parked = 0, 0
	}
	s.Fork = min(s.Fork, s.Cold)
	s.Parked = min(s.Parked, cmp.Or(s.Fork, s.Cold))
}

// lengths sets the lengths of the requests of a stage's pipelines, from the shares of the stage.
func (c *conversion) lengths(key string) {
	f := c.functions[key]
	const parts = 50
	var list []int
	longest := 0
	for _, l := range f.Lengths {
		longest = max(longest, l.MaxLength)
		for range int(math.Round(min(l.Share, 1) * parts)) {
			list = append(list, cmp.Or(l.MaxLength, longest+1))
		}
	}
	if len(list) == 0 {
		c.note("%s: the lengths of its inputs are unknown; the simulation takes none of them as too long for a variant.", c.named(key))
		return
	}
	c.note("%s: only the shares of short and long inputs are known; each input counts as the longest of its class.", c.named(key))
	for i, p := range c.chosen {
		if slices.Contains(p.Stages, key) {
			c.run.Scenario.Pipelines[i].Length = sim.Length{List: list}
		}
	}
}

func pointer[T any](v T) *T { return &v }

// round rounds to four digits behind the point.
func round(v float64) float64 { return math.Round(v*1e4) / 1e4 }
