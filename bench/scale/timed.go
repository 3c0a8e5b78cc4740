package scale

import (
	"runtime/metrics"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/placement"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

// newMeter returns a meter of the default policies.
func newMeter() (*meter, error) {
	m := &meter{now: map[string]*cost{}}
	set, err := policy.Names{}.Choose()
	if err != nil {
		return nil, err
	}
	names := set.Names()
	set = policy.WithAllocator(set, names.Allocator, timedAllocator{autoscaler.NewSizer(autoscaler.Config{}), m})
	set = policy.WithCorrector(set, names.Corrector, timedCorrector{autoscaler.NewQuart(autoscaler.QuartConfig{}), m})
	set = policy.WithSharer(set, names.Sharer, timedSharer{autoscaler.Gain{}, m})
	set = policy.WithPlacer(set, names.Placer, timedPlacer{placement.Dispersed{}, m})
	m.set = policy.WithWarmer(set, names.Warmer, timedWarmer{placement.KeyStages{}, m})
	return m, nil
}

// threadTime returns how long this thread has run on a core.
func threadTime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) // Linux has this clock
	return time.Duration(t.Nano())
}

// allocated returns how many bytes this process has allocated so far.
func allocated() uint64 {
	sample := [1]metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample[:])
	return sample[0].Value.Uint64()
}

type timedAllocator struct {
	plan.Allocator[autoscaler.Memory]
	m *meter
}

// Allocate implements plan.Allocator.
func (t timedAllocator) Allocate(s plan.Snapshot, d plan.Domain, m autoscaler.Memory) (a plan.Alloc, next autoscaler.Memory, err error) {
	t.m.stage("allocate", func() { a, next, err = t.Allocator.Allocate(s, d, m) })
	return a, next, err
}

type timedCorrector struct {
	plan.Corrector[autoscaler.QuartMemory]
	m *meter
}

// Correct implements plan.Corrector.
func (t timedCorrector) Correct(s plan.Snapshot, d plan.Domain, a plan.Alloc, m autoscaler.QuartMemory) (out plan.Alloc, next autoscaler.QuartMemory, err error) {
	t.m.stage("correct", func() { out, next, err = t.Corrector.Correct(s, d, a, m) })
	return out, next, err
}

type timedSharer struct {
	plan.Sharer
	m *meter
}

// Share implements plan.Sharer.
func (t timedSharer) Share(s plan.Snapshot, a plan.Alloc) (out plan.Alloc, err error) {
	t.m.stage("share", func() { out, err = t.Sharer.Share(s, a) })
	return out, err
}

type timedPlacer struct {
	plan.Placer
	m *meter
}

// Place implements plan.Placer.
func (t timedPlacer) Place(s plan.Snapshot, a plan.Alloc) (wants []plan.Want, err error) {
	t.m.stage("place", func() { wants, err = t.Placer.Place(s, a) })
	return wants, err
}

type timedWarmer struct {
	plan.Warmer
	m *meter
}

// Warm implements plan.Warmer.
func (t timedWarmer) Warm(s plan.Snapshot, wants []plan.Want) (warm []plan.Warm, err error) {
	t.m.stage("warm", func() { warm, err = t.Warmer.Warm(s, wants) })
	return warm, err
}
