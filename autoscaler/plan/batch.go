package plan

import (
	"fmt"
	"slices"
	"time"
)

// ChooseBatches sets the Batch of each function that leaves it to its profile: see
// [Snapshot.AutoBatch]. The profiles and pipelines of s must be complete.
func (s *Snapshot) ChooseBatches() {
	for i := range s.Functions {
		if f := &s.Functions[i]; f.AutoBatch > 0 {
			f.Batch, _ = s.AutoBatch(i)
		}
	}
}

// AutoBatch returns the batch size for the function at an index of s.Functions, and why. It is the
// largest profiled size, up to the function's AutoBatch, whose time is at most half of the stage's
// share of the objective. So a call that just misses a batch still ends in time. It is 1 without a
// profile or an objective.
//
// A pipeline's objective is shared by service time along the longest path through the stage. The
// time of a stage is that of one call: as profiled, or else as measured. A stage of unknown time
// counts as nothing. If the function serves several pipelines, the smallest share counts.
func (s *Snapshot) AutoBatch(at int) (n int, why string) {
	f := &s.Functions[at]
	sizes := f.batchTimes()
	falls := sizes.rise()
	if len(sizes) == 0 {
		return 1, "batch 1: no profile (`stagecoach profile` measures one)"
	}
	share, of := s.share(f, sizes.one())
	if share <= 0 {
		return 1, "batch 1: no objective (stagecoach.dev/slo)"
	}
	n, took, larger := 1, sizes.one(), 0
	for _, b := range sizes {
		switch {
		case b.Mean > share/2:
		case b.Size <= f.AutoBatch:
			n, took = b.Size, b.Mean
		default:
			larger = b.Size
		}
	}
	if took > share/2 {
		return 1, fmt.Sprintf("batch 1: one call takes %v, more than half of the share %v of the objective %v", round(took), round(share), of)
	}
	why = fmt.Sprintf("batch %d of up to %d: it takes %v, at most half of the share %v of the objective %v", n, f.AutoBatch, round(took), round(share), of)
	if larger > 0 {
		why += fmt.Sprintf("; a batch of %d would be in time too, and is above the limit (stagecoach.dev/batch, or what the stage takes)", larger)
	}
	if falls > 0 {
		why += "; " + Falls(falls)
	}
	return n, why
}

// FallingBatch returns the first batch size up to f's batch that takes clearly less time than a
// smaller one, by the profile. It returns 0 if there is none, or if f has no batches.
func (f *Function) FallingBatch() int {
	if f.Batch <= 1 {
		return 0
	}
	if falls := f.batchTimes().rise(); falls <= f.Batch {
		return falls
	}
	return 0
}

// Falls describes a profile that says that a batch of this size takes less than a smaller one.
func Falls(size int) string {
	return fmt.Sprintf("the profile says that a batch of %d takes less than a smaller one, so the smaller one's time counts: measure it again", size)
}

func round(d time.Duration) time.Duration { return d.Round(100 * time.Microsecond) }

// batchTimes has the profiled time of each batch size, sorted by size.
type batchTimes []Batched

// rise makes each time at least that of the smaller sizes, because no larger batch takes less time.
// It returns the first size whose time was clearly less, by more than a tenth; 0: none.
func (t batchTimes) rise() (falls int) {
	for i := 1; i < len(t); i++ {
		before := t[i-1].Mean
		if falls == 0 && t[i].Mean < before-before/10 {
			falls = t[i].Size
		}
		t[i].Mean = max(t[i].Mean, before)
	}
	return falls
}

// one returns the time of one call. If size 1 was not measured, it is the smallest size's time
// divided by that size.
func (t batchTimes) one() time.Duration {
	if len(t) == 0 {
		return 0
	}
	return t[0].Mean / time.Duration(max(t[0].Size, 1))
}

// batchTimes returns the profiled times with the present CPU limit: those of the largest measured
// quota that does not exceed it, or of the smallest quota. Without a limit, the largest quota
// counts. Of several lengths, the slowest counts.
func (f *Function) batchTimes() (out batchTimes) {
	limit, quota := f.CPULimit, 0
	if f.CPUNow > 0 {
		limit = f.CPUNow
	}
	for _, p := range f.Profile { // sorted by CPU
		if quota == 0 || limit <= 0 || p.CPUMilli <= limit {
			quota = p.CPUMilli
		}
	}
	for _, p := range f.Profile {
		if p.CPUMilli != quota || p.Batch < 1 || p.Mean <= 0 {
			continue
		}
		i, found := slices.BinarySearchFunc(out, p.Batch, func(b Batched, size int) int { return b.Size - size })
		if !found {
			out = slices.Insert(out, i, Batched{Size: p.Batch})
		}
		out[i].Mean, out[i].N = max(out[i].Mean, p.Mean), out[i].N+p.N
	}
	return out
}

// ProfiledBatches returns the profiled time of each batch size with the function's present CPU
// limit, sorted by size. A larger batch takes at least as long as a smaller one: if the profile
// says otherwise, the smaller one's time counts.
func (f *Function) ProfiledBatches() []Batched {
	out := f.batchTimes()
	out.rise()
	return out
}

// callTime returns the time of one call; 0: unknown.
func (f *Function) callTime() time.Duration {
	switch one := f.batchTimes().one(); {
	case one > 0:
		return one
	case f.Service.Known:
		return f.Service.Mean
	case f.Learned.Known:
		return f.Learned.Mean
	}
	return 0
}

// share returns f's smallest share of an objective, and that objective; 0: there is none. one is
// the time of one call of f.
func (s *Snapshot) share(f *Function, one time.Duration) (share, of time.Duration) {
	if f.Objective > 0 {
		return f.Objective, f.Objective
	}
	stage := f.Name
	if f.VariantOf != "" {
		stage = f.VariantOf
	}
	find := s.Finder()
	for i := range s.Pipelines {
		p := &s.Pipelines[i]
		at := slices.Index(p.Stages, stage)
		if at < 0 || p.SLO <= 0 || one <= 0 {
			continue
		}
		times := make([]time.Duration, len(p.Stages))
		for k, name := range p.Stages {
			if j, ok := find.Index(name); ok {
				times[k] = s.Functions[j].callTime()
			}
		}
		times[at] = one
		part := time.Duration(float64(p.SLO) * float64(one) / float64(longestThrough(p, times, at)))
		if share == 0 || part < share {
			share, of = part, p.SLO
		}
	}
	return share, of
}

// longestThrough returns the time of the longest path through a stage. Stages are in topological
// order.
func longestThrough(p *Pipeline, times []time.Duration, at int) time.Duration {
	before, after := make([]time.Duration, len(times)), make([]time.Duration, len(times))
	for _, e := range p.Edges { // sorted by From
		before[e.To] = max(before[e.To], before[e.From]+times[e.From])
	}
	for _, e := range slices.Backward(p.Edges) {
		after[e.From] = max(after[e.From], after[e.To]+times[e.To])
	}
	return before[at] + times[at] + after[at]
}
