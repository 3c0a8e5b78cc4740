package cluster

import (
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

const (
	// formersKept is how many revisions of a function can be started again. A request rarely lives
	// through more updates.
	formersKept = 8
	// reviveFor is how long a revival is tried while something else ends its starts, or its node is
	// away.
	reviveFor = time.Minute
)

// former is what is needed to start a replica of a revision again after plans want a newer one.
type former struct {
	spec    FunctionSpec
	slot    plan.Slot // of its latest replica
	wanted  bool      // requests wait for a replica that has not been ordered yet
	since   time.Time // when the dispatcher asked for it
	failed  int       // failed starts of such replicas, in a row
	waiting time.Time // end of the back-off before the next start
}

// remember stores the spec and the slot of an ordered replica. It keeps the newest formersKept
// revisions.
func (k *function) remember(spec FunctionSpec, slot plan.Slot) {
	if k.formers == nil {
		k.formers = map[uint64]*former{}
	}
	if f := k.formers[spec.Revision]; f != nil {
		f.spec, f.slot = spec, slot
		return
	}
	k.formers[spec.Revision] = &former{spec: spec, slot: slot}
	if len(k.formers) > formersKept {
		delete(k.formers, slices.Min(slices.Collect(maps.Keys(k.formers))))
	}
}

// Revive starts a replica of a revision that plans no longer want. It is called when requests have
// begun on the revision and its last replica was lost. Revive returns at once. If no replica of the
// revision can be started, NoReplica of [Lines] is called.
func (l *Local) Revive(function pipeline.Key, revision uint64) {
	l.mu.Lock()
	var f *former
	k := l.functions[function]
	if k != nil && !l.closed {
		f = k.formers[revision]
	}
	if f != nil {
		now := l.now()
		if now.Sub(f.waiting) > lastBackoff { // the failures are too old to count
			f.failed = 0
		}
		f.wanted, f.since = true, now
		k.asked = true
	}
	l.mu.Unlock()
	if f == nil {
		l.cfg.Lines.NoReplica(function, revision, fmt.Sprintf("revision %d is not known any more", revision))
		return
	}
	l.cfg.Changed()
}

// revive orders the replicas that [Local.Revive] asked for. It returns the revisions that get no
// more replicas. The caller holds l.mu.
func (l *Local) revive(rev uint64) (failed []failedFunction) {
	for key, k := range l.functions {
		if k.deployed == nil || !k.asked {
			continue
		}
		k.asked = false
		for revision, f := range k.formers {
			k.asked = k.asked || f.wanted
			if !f.wanted || revision == k.deployed.Revision || l.now().Before(f.waiting) || l.serves(key, revision) {
				continue
			}
			why := plan.Want{Why: fmt.Sprintf("requests have begun on revision %d", revision)}
			f.wanted = false // the dispatcher asks again when the replica is lost
			home := f.slot
			r := l.order(rev, f.spec, why, l.room(f))
			f.slot = home
			if r != nil {
				r.revived = true
			} else if cause := k.unrevived(revision, l.now(), l.cfg.Cordons.refusal(f.slot.Node), false); cause != "" {
				failed = append(failed, failedFunction{function: key, revision: revision, cause: cause})
			}
		}
	}
	return failed
}

// serves reports whether a replica of a revision takes tasks, or will once it is ready. The caller
// holds l.mu.
func (l *Local) serves(function pipeline.Key, revision uint64) bool {
	for _, r := range l.replicas {
		if r.function == function && r.spec.Revision == revision && r.state != plan.Draining && !r.released {
			return true
		}
	}
	return false
}

// room returns the slot for the next replica of f, which is the slot of its latest replica. If that
// slot has no device and its node is away or cordoned, room chooses another node, and a different
// one after each failed start. If it has a device and its node is cordoned, room chooses a node
// with a free device. The caller holds l.mu.
func (l *Local) room(f *former) plan.Slot {
	slot := f.slot
	slot.Replica = ""
	_, closed := l.cfg.Cordons.of(slot.Node)
	switch n := l.nodes[slot.Node]; {
	case !closed && (slot.Device != "" || n != nil && n.presence == here):
		return slot
	case slot.Device != "":
		if other, ok := deviceRoom(l, f); ok {
			return other
		}
		return slot
	}
	var others []string
	for _, name := range slices.Sorted(maps.Keys(l.nodes)) {
		if l.cfg.Cordons.open(l.nodes[name]) {
			others = append(others, name)
		}
	}
	if len(others) > 0 {
		slot.Node = others[f.failed%len(others)]
	}
	return slot
}

// unrevived records that a revived replica did not start. counts is true for a failed start. It is
// false if something else ended the start, or if the node is away. unrevived returns why no other
// start follows, or "" if one does. The caller holds l.mu.
func (k *function) unrevived(revision uint64, now time.Time, failed error, counts bool) (cause string) {
	f := k.formers[revision]
	if f == nil {
		return fmt.Sprintf("revision %d is not known any more", revision)
	}
	if counts {
		f.failed++
	}
	f.waiting = now.Add(Backoff(max(f.failed, 1)))
	switch {
	case f.failed >= maxFailures:
		f.wanted, f.failed = false, 0
		return fmt.Sprintf("%d replicas of revision %d did not start; the last failure: %v", maxFailures, revision, failed)
	case now.Sub(f.since) >= reviveFor:
		f.wanted = false
		return fmt.Sprintf("no replica of revision %d has started within %v; the last failure: %v", revision, reviveFor, failed)
	}
	f.wanted, k.asked = true, true
	return ""
}

// newest returns the newest revision that has a ready replica. It returns 0 if there is none.
func newest(have []*replica) uint64 {
	revision := uint64(0)
	for _, r := range have {
		if r.state == plan.Ready && !r.released {
			revision = max(revision, r.spec.Revision)
		}
	}
	return revision
}
