package resources

import (
	"errors"
	"os"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
)

// Bounds of how often memory is looked at.
const (
	SampleFresh = 100 * time.Millisecond // a sample that is not older is not taken again
	// Exact measurements take at most one part in so many of the time.
	exactShare = 100
)

// Sample is what memory looked like at some time.
type Sample struct {
	at     time.Time
	Bounds []Bound
	Own    int64  // bytes, by this node's zygotes and replicas
	Epoch  uint64 // of the Census that was counted
}

// Census is what runs on a node and has to be counted.
type Census struct {
	Families []Family
	Coming   map[int]int64 // bytes that loads under way are expected to take, by their process
	Going    []int         // processes of zygotes that are being ended
	Epoch    uint64        // grows when a zygote comes or goes
}

// Parent is a zygote as it is counted.
type Parent struct {
	Entry  string // of the warden; empty: there is no zygote
	PID    int    // 0: it is no process but memory
	Bytes  int64  // proportional set size once loaded
	Shared int64  // of a worker: bytes resident in it that are other processes' part of what it shares
	Worker bool
}

// Family is a zygote with its replicas, or the replicas without one.
type Family struct {
	Of       Parent
	Replicas []Copied
	// Bytes: as it seems, and if the replicas have changed all that they were forked with.
	seems, most int64
}

// Copied is a replica as it is counted.
type Copied struct {
	PID   int
	Bytes int64 // of its own, as its cgroup says; -1: it has none
}

// Scale counts what a node's processes take of its memory. Its methods are safe for concurrent use.
type Scale struct {
	meter Meter
	own   int64 // bytes that the node's processes may take together; 0: not bounded

	mu     sync.Mutex // guards what follows, and is held while memory is measured
	latest Sample
	exact  struct { // the latest exact measurement
		beyond map[string]int64 // bytes that families take beyond what it seemed, by entry of the zygote
		next   time.Time        // not before
	}
}

// NewScale returns a Scale for a node whose processes may take so many bytes together; 0: not
// bounded.
func NewScale(m Meter, own int64) *Scale { return &Scale{meter: m, own: own} }

// Weigh samples the memory, unless that was done so long ago at most. look returns what runs. It is
// called under the Scale's lock, so the caller must hold no lock that look takes.
func (s *Scale) Weigh(fresh time.Duration, look func() Census) Sample {
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.latest.at) < fresh {
		return s.latest
	}
	c := look()
	out := Sample{Epoch: c.Epoch, Bounds: s.meter.Bounds()}
	var mapped, most int64
	for i := range c.Families {
		f := &c.Families[i]
		mapped += f.weigh(s.meter)
		out.Own += f.seems
		most += f.most
	}
	if s.own > 0 && (Bound{Total: s.own, Used: most}).Below(cache.CalmBelow) < 0 {
		out.Own += s.beyond(c.Families)
	}
	twice := int64(0) // what leaves, and what is counted as coming already
	for _, pid := range c.Going {
		own, _ := s.meter.Resident(pid)
		twice += own
	}
	for pid, bytes := range c.Coming {
		own, _ := s.meter.Resident(pid)
		twice += min(own, bytes)
	}
	for i := range out.Bounds {
		out.Bounds[i].Used += mapped - twice
	}
	if s.own > 0 {
		out.Bounds = append([]Bound{{Name: BoundOwn, Total: s.own, Used: out.Own}}, out.Bounds...)
	}
	out.at = time.Now()
	s.latest = out
	return out
}

// weigh says what a family takes, and returns how much of it are pages of a file that its zygote
// alone maps.
func (f *Family) weigh(m Meter) (mapped int64) {
	var anonymous, files int64
	if f.Of.Entry != "" {
		f.seems = f.Of.Bytes
		if f.Of.PID != 0 {
			anonymous, files = m.Resident(f.Of.PID)
			if f.Of.Worker { // it has grown by its replicas' parameters
				f.seems = max(f.seems, anonymous+files-f.Of.Shared)
			}
			mapped = min(files, max(0, f.seems-anonymous)) // the rest is libraries, which all share
		}
	}
	f.most = f.seems
	for _, r := range f.Replicas {
		if r.Bytes >= 0 {
			f.seems += r.Bytes
			f.most += r.Bytes
			continue
		}
		own, _ := m.Resident(r.PID)
		f.seems += max(0, own-anonymous) // what a fork has not changed is its zygote's
		// Unless it has changed all of it, which only an exact look tells.
		f.most += own
	}
	return mapped
}

// beyond returns how much more families take than it seems, as an exact look tells. If the latest
// look was too recent for the time that it took, that one counts. s.mu is held.
func (s *Scale) beyond(all []Family) (bytes int64) {
	if begin := time.Now(); !begin.Before(s.exact.next) {
		s.exact.beyond = map[string]int64{}
		for _, f := range all {
			if f.most > f.seems {
				s.exact.beyond[f.Of.Entry] = max(0, f.exactly(s.meter)-f.seems)
			}
		}
		s.exact.next = time.Now().Add(exactShare * time.Since(begin))
	}
	for _, f := range all {
		// Of replicas that have ended meanwhile nothing.
		bytes += min(s.exact.beyond[f.Of.Entry], f.most-f.seems)
	}
	return bytes
}

// exactly measures a zygote's family; 0: it cannot be done.
func (f *Family) exactly(m Meter) int64 {
	n, changed := int64(0), int64(0)
	// The zygote has its part of what it shares with them.
	for _, r := range append([]Copied{{f.Of.PID, -1}}, f.Replicas...) {
		if r.Bytes >= 0 {
			changed += r.Bytes
			continue
		}
		one, err := m.Exact(r.PID)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return 0
		}
		n += one
	}
	return max(n, f.Of.Bytes) + changed // what has given way of a file is read in again
}
