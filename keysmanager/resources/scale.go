package resources

import (
	"errors"
	"os"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
)

// Bounds of how often memory is measured.
const (
	SampleFresh = 100 * time.Millisecond // a sample that is younger is not taken again
	// Exact measurements take at most one part in exactShare of the time.
	exactShare = 100
)

// Sample is the memory at one time.
type Sample struct {
	at     time.Time
	Bounds []Bound
	Own    int64  // bytes, by this node's zygotes and replicas
	Epoch  uint64 // of the Census that was counted
}

// Census is the set of processes on a node whose memory counts.
type Census struct {
	Families []Family
	Coming   map[int]int64 // bytes that loads under way are expected to take, by the pid of the load
	Going    []int         // pids of zygotes that are being ended
	Epoch    uint64        // grows when a zygote starts or ends
}

// Parent is a zygote in the form in which memory is counted.
type Parent struct {
	Entry  string // of the warden; empty: there is no zygote
	PID    int    // 0: memory in place of a process
	Bytes  int64  // proportional set size once loaded
	Shared int64  // of a worker: resident bytes that it shares and that count for other processes
	Worker bool
}

// Family is a zygote with its replicas, or the replicas that have no zygote.
type Family struct {
	Of       Parent
	Replicas []Copied
	// Bytes: the estimate, and the estimate if the replicas have changed all memory that they were
	// forked with.
	seems, most int64
}

// Copied is a replica in the form in which memory is counted.
type Copied struct {
	PID   int
	Bytes int64 // of its own, from its cgroup; -1: it has none
}

// Scale counts the memory that a node's processes take. Its methods are safe for concurrent use.
type Scale struct {
	meter Meter
	own   int64 // bytes that the node's processes may take together; 0: no limit

	mu     sync.Mutex // guards the fields below, and is held while memory is measured
	latest Sample
	exact  struct { // the latest exact measurement
		beyond map[string]int64 // bytes that families take beyond the estimate, by the zygote's entry
		next   time.Time        // time of the next exact measurement
	}
}

// NewScale returns a Scale for a node whose processes may take this many bytes together; 0: no
// limit.
func NewScale(m Meter, own int64) *Scale { return &Scale{meter: m, own: own} }

// Weigh samples the memory. If the latest sample is younger than fresh, Weigh returns that one.
// look returns the processes to count. Weigh calls look while it holds the Scale's lock, so the
// caller must not hold a lock that look takes.
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
	// Bytes that would be counted twice: what leaves, and what is counted as coming already.
	twice := int64(0)
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

// weigh sets the estimates of the family's memory. It returns how many bytes of that are pages of a
// file that only the family's zygote maps.
func (f *Family) weigh(m Meter) (mapped int64) {
	var anonymous, files int64
	if f.Of.Entry != "" {
		f.seems = f.Of.Bytes
		if f.Of.PID != 0 {
			anonymous, files = m.Resident(f.Of.PID)
			if f.Of.Worker { // it has grown by its replicas' parameters
				f.seems = max(f.seems, anonymous+files-f.Of.Shared)
			}
			// The rest is libraries, which all processes share.
			mapped = min(files, max(0, f.seems-anonymous))
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
		f.seems += max(0, own-anonymous) // pages that a fork has not changed are its zygote's
		// The replica may have changed all of them. Only an exact measurement tells.
		f.most += own
	}
	return mapped
}

// beyond returns how many bytes families take in addition to the estimate, according to an exact
// measurement. If the next exact measurement is not due yet, the latest one counts; see exactShare.
// The caller holds s.mu.
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
		// Replicas that have ended meanwhile take nothing.
		bytes += min(s.exact.beyond[f.Of.Entry], f.most-f.seems)
	}
	return bytes
}

// exactly measures the memory of a zygote's family; 0: it cannot be measured.
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
	return max(n, f.Of.Bytes) + changed // file pages that were evicted are read in again
}
