package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// How often a function is tried on a device that had too little memory for it.
const (
	firstBar = 30 * time.Second
	lastBar  = 10 * time.Minute
	// tolerated is the number of times that a call may find a device out of memory before the
	// device is barred. A single large call may be the cause, which is no reason to bar the device
	// for other replicas.
	tolerated = 2
)

// BarFor returns how long a function is kept off a device after the count-th consecutive time that
// it was out of memory there: half a minute, then twice as long each time, up to ten minutes.
func BarFor(count int) time.Duration {
	if count < 1 {
		return 0
	}
	return min(firstBar<<min(count-1, 16), lastBar)
}

// bars holds the devices that one revision of a function is or recently was kept off.
type bars struct {
	revision uint64
	all      []bar // sorted by node, then device
}

type bar struct {
	plan.Bar
	at        time.Time // latest time out of memory
	tolerated int       // number of times that did not bar the device
}

// add records that a replica of this revision was out of memory now, and bars the replica's devices
// on its node for its function. call is true if the replica had answered calls before and still
// lives. A device is not barred in these cases:
//   - The function has a newer revision.
//   - The replica was ordered before the latest failure on the device (at the time begun). Both
//     failures count as one.
//   - call is true, and this is one of the first [tolerated] such failures on the device.
//
// add returns the barred devices and the end of the bar.
func (b *bars) add(revision uint64, node string, devices []string, call bool, begun, now time.Time, cause string) (barred []string, until time.Time) {
	if revision < b.revision {
		return nil, until
	}
	b.follow(revision)
	for _, id := range devices {
		i, known := slices.BinarySearchFunc(b.all, plan.Bar{Node: node, Device: id}, func(x bar, want plan.Bar) int {
			return cmp.Or(cmp.Compare(x.Node, want.Node), cmp.Compare(x.Device, want.Device))
		})
		if !known {
			b.all = slices.Insert(b.all, i, bar{Bar: plan.Bar{Node: node, Device: id}})
		}
		x := &b.all[i]
		if !x.at.IsZero() && !begun.After(x.at) {
			continue
		}
		if x.past(now) {
			x.Count, x.tolerated = 0, 0
		}
		if call && x.tolerated < tolerated {
			x.tolerated++
			if x.at = now; x.Until.Before(now) {
				x.Until = now
			}
			continue
		}
		x.Count++
		x.at, x.Until, x.Cause = now, now.Add(BarFor(x.Count)), cause
		barred, until = append(barred, id), x.Until
	}
	return barred, until
}

// past reports whether the bar ended so long ago that the next one counts as the first.
func (b *bar) past(now time.Time) bool { return now.Sub(b.Until) >= lastBar }

// follow forgets all bars when the function has a newer revision.
func (b *bars) follow(revision uint64) {
	if revision > b.revision {
		*b = bars{revision: revision}
	}
}

// now returns the present bars, and forgets those that are past.
func (b *bars) now(now time.Time) []plan.Bar {
	var hold []plan.Bar
	b.all = slices.DeleteFunc(b.all, func(x bar) bool { return x.past(now) })
	for _, x := range b.all {
		if x.Until.After(now) {
			hold = append(hold, x.Bar)
		}
	}
	return hold
}

// blamed returns the replica's devices that are named in the error, or all its devices if none is
// named there.
func blamed(devices []string, short *task.MemoryError) []string {
	named := slices.DeleteFunc(slices.Clone(devices), func(id string) bool { return !slices.Contains(short.Devices, id) })
	if len(named) == 0 {
		return devices
	}
	return named
}

// OutOfMemory reports that a replica's device had too little memory for a call. The replica is
// released, and its function is kept off the device for a while. If the replica has no device, the
// failure counts as a failed start. OutOfMemory returns at once. It does nothing for an unknown
// replica.
func (l *Local) OutOfMemory(replica string, short *task.MemoryError) {
	l.mu.Lock()
	r := l.replicas[replica]
	if r != nil {
		if r.device == "" {
			l.of(r.function).failure.add(r, l.now(), short.Text, false, l.cfg.Chance())
		}
		l.bar(r, r.answer.after > 0, l.now(), short)
		r.release(fmt.Errorf("out of memory: %w", short))
	}
	l.mu.Unlock()
	if r != nil {
		l.cfg.Changed()
	}
}

// bar keeps r's function off r's devices, at most once per replica. call has the same meaning as
// for add. The caller holds l.mu.
func (l *Local) bar(r *replica, call bool, now time.Time, short *task.MemoryError) {
	if r.starved || r.device == "" {
		return
	}
	r.starved = true
	devices := blamed(plan.Slot{Device: r.device}.Devices(), short)
	for _, id := range devices {
		l.metrics.memory.WithLabelValues(r.node, id).Inc()
	}
	barred, until := l.of(r.function).bars.add(r.spec.Revision, r.node, devices, call, r.begun, now, short.Text)
	if len(barred) == 0 {
		return
	}
	what := fmt.Sprintf("%s not tried for %v: %s", strings.Join(barred, " and "), until.Sub(now), short.Text)
	l.note(r, Event{Kind: Barred, Cause: what})
	l.cfg.Log.Warn("a function was out of memory on a device and is kept from it", "function", r.function, "replica", r.name, "node", r.node, "cause", what)
}

// Bars returns the devices that a function is kept off now, sorted by node, then device. Times are
// wall clock times.
func (l *Local) Bars(function pipeline.Key) []plan.Bar {
	now := l.now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if f := l.functions[function]; f != nil {
		hold := f.bars.now(now)
		for i := range hold {
			hold[i].Until = l.told(hold[i].Until)
		}
		return hold
	}
	return nil
}

// nowhere returns why a function has no replica and will not get one soon. The text continues a
// sentence that starts with the function's name. nowhere returns "" if there is or may be a place
// for a replica. never is the result of [lackText] for the function. The causes are:
//   - The budget denies the replica.
//   - No node could hold the replica.
//   - All devices that could hold the replica are barred.
func nowhere(w plan.Want, bars []plan.Bar, never string) (cause string) {
	switch {
	case len(w.Slots) > 0 || w.Short == "":
		return ""
	case w.Denied:
		return "has no replica: " + w.Short
	case never != "":
		return "has no replica, and " + never
	case len(bars) == 0:
		return ""
	}
	return fmt.Sprintf("was out of memory, and there is no other device for it: %s; %s", w.Short, task.MoreMemory)
}

// alive reports whether some of the replicas serve or may serve.
func alive(have []*replica) bool {
	return slices.ContainsFunc(have, func(r *replica) bool { return r.state != plan.Draining && !r.released })
}
