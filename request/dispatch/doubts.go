package dispatch

import (
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// A doubt is the end of a replica under a batch of several calls. Either one of the calls ends
// replicas, or the batch was too large, for example for the replica's memory. The calls' next
// attempts, which run alone (see suspects.go), tell which:
//
//   - If a replica ends by itself under one of them, that call is the cause.
//   - If all calls are answered, the batch was too large. Batches of the lane have at most half of
//     its size from then on, until a deploy that changes the revision or the declared batch.
//
// Until then, batches have at most half of the size, too. A doubt whose calls do not come back ends
// after doubtLifetime: the function is not idempotent, or nobody waits for the calls any more.
type doubt struct {
	size  int               // calls of the largest batch that the replica had
	calls map[task.Key]bool // calls that have not been answered since, as callOf returns them
	until time.Time
}

// doubtLifetime is the longest time for which a doubt lasts.
const doubtLifetime = time.Minute

// callOf returns the key that all attempts of a call have in common.
func callOf(k task.Key) task.Key {
	k.Attempt = 0
	return k
}

// lost draws conclusions from the end of the i-th replica, before its calls are answered. revision
// is the deployed one.
func (b *batching) lost(now time.Time, f *fleet, i int, revision uint64, blame task.Blame, end task.End) {
	r := f.replicas[i]
	if end != task.EndItself || r.revision != revision {
		return
	}
	d := &doubt{calls: map[task.Key]bool{}, until: now.Add(doubtLifetime)}
	for _, b := range r.batches {
		for _, it := range b.items {
			if it != nil && it.state == running {
				d.calls[callOf(it.task.Key)] = true
				d.size = max(d.size, len(b.items))
			}
		}
	}
	switch {
	case blame == task.BlameAlone:
		b.doubts = slices.DeleteFunc(b.doubts, func(old *doubt) bool {
			for call := range d.calls {
				return old.calls[call]
			}
			return false
		})
	case blame == task.BlameCompany && d.size > 1:
		b.doubts = append(b.doubts, d)
	}
	b.apply(f)
}

// acquit notes that a call that ran alone has not ended its replica. It returns the size of the
// batch that was too large, if that is known now and gives a smaller limit; otherwise 0.
func (b *batching) acquit(it *item) (size int) {
	call := callOf(it.task.Key)
	k := slices.IndexFunc(b.doubts, func(d *doubt) bool { return d.calls[call] })
	if k < 0 {
		return 0
	}
	d := b.doubts[k]
	if delete(d.calls, call); len(d.calls) > 0 {
		return 0
	}
	b.doubts = slices.Delete(b.doubts, k, k+1)
	if half := d.size / 2; b.survived == 0 || half < b.survived {
		b.survived = half
		return d.size
	}
	return 0
}

// forget ends the doubts that are too old.
func (b *batching) forget(now time.Time, f *fleet) {
	before := len(b.doubts)
	b.doubts = slices.DeleteFunc(b.doubts, func(d *doubt) bool { return !d.until.After(now) })
	if len(b.doubts) < before {
		b.apply(f)
	}
}
