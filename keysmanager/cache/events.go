package cache

import "time"

// Event is an input of the core: one of [Hold], [Release], [Want], [Loaded], [Failed], [Ended],
// [Using], [Mark], [Invalidate], [Drop] and [Weighed]. Hold and Loaded add an entry that the core
// does not know. All other events about an unknown entry have no effect.
type Event interface{ event() }

// Hold reports that an order is about to start from an entry. The entry is now the most recently
// used one, and it is busy until [Release].
type Hold[K comparable] struct{ Key K }

// Release ends a Hold, because the order has started its replica or was given up.
type Release[K comparable] struct{ Key K }

// Want asks to load the parameters of an entry. It has no effect if the entry is ready, loading or
// stale. Otherwise Step returns exactly one of these effects:
//
//   - [Wait]: the back-off after an earlier failure is not over;
//   - [Unpark]: parked children end first. Send Want again, with Freed set to the bytes that they
//     free;
//   - [Refuse]: the parameters would not fit even without the idle entries;
//   - [Load]: the load begins. An [Evict] comes before it for each entry that makes room.
type Want[K comparable] struct {
	Key    K
	Bytes  int64   // expected size, at least 0
	Bounds []Bound // the memory in use now, without loads under way
	Freed  int64   // of that, bytes of parked children that are ending
}

// Loaded reports that an entry's parameters are in memory, and their measured size. They were just
// loaded, or were adopted from an earlier process.
type Loaded[K comparable] struct {
	Key   K
	Bytes int64
}

// Failed reports that the load of an entry has failed, or that it could not even begin.
type Failed[K comparable] struct{ Key K }

// Ended reports that the process of a ready entry has ended without an [Evict].
type Ended[K comparable] struct {
	Key   K
	Lived time.Duration // since it had loaded
}

// Using sets how an entry is used. The shell sends it before each event that could evict.
type Using[K comparable] struct {
	Key      K
	Replicas int  // that run from it or are being forked
	Parked   int  // children that are parked on devices
	Wanted   bool // a deployed function uses it
	// Rests is how long a worker stays while it is idle; 0: it is no worker. Wanted does not matter
	// for a worker.
	Rests time.Duration
}

// Mark names the entries of key stages. All other entries do not belong to key stages.
type Mark[K comparable] struct{ Keys []K }

// Invalidate makes an entry stale: later starts must not use its parameters. [Cancel] follows if
// the entry is loading. [Settled] follows as soon as no order holds the entry.
type Invalidate[K comparable] struct{ Key K }

// Drop evicts an entry on request, if it is ready and idle.
type Drop[K comparable] struct{ Key K }

// Weighed reports the memory in use. The core then evicts entries that have expired, and idle
// entries if memory is short.
type Weighed struct{ Bounds []Bound }

func (Hold[K]) event()       {}
func (Release[K]) event()    {}
func (Want[K]) event()       {}
func (Loaded[K]) event()     {}
func (Failed[K]) event()     {}
func (Ended[K]) event()      {}
func (Using[K]) event()      {}
func (Mark[K]) event()       {}
func (Invalidate[K]) event() {}
func (Drop[K]) event()       {}
func (Weighed) event()       {}

// Effect is an output of the core: one of [Load], [Wait], [Refuse], [Unpark], [Evict], [Forget],
// [Discard], [Cancel] and [Settled]. Carry out effects in order.
type Effect interface{ effect() }

// Load begins to load the parameters of an entry, once the entries that were evicted for it have
// ended. [Loaded] or [Failed] has to follow.
type Load[K comparable] struct{ Key K }

// Wait answers a [Want] during a back-off, which ends at Until.
type Wait[K comparable] struct {
	Key   K
	Until time.Time
}

// Refuse answers a [Want] whose parameters do not fit. Missing is how many bytes they would lack
// even after all idle entries were evicted.
type Refuse[K comparable] struct {
	Key     K
	Missing int64
}

// Unpark ends all parked children, because memory is short.
type Unpark struct{}

// Evict ends an entry's process and its parked children. The core has forgotten the entry.
type Evict[K comparable] struct {
	Key   K
	Why   Reason
	For   K         // the entry that it makes room for; set only if Why is Room
	Bound string    // name of the bound that is short; set only if Why is Pressure
	Since time.Time // when functions stopped using it; zero: they use it
}

// Forget reports that the core has forgotten an entry that was empty.
type Forget[K comparable] struct{ Key K }

// Discard ends parameters that were invalidated while they loaded.
type Discard[K comparable] struct{ Key K }

// Cancel gives up a load that is under way.
type Cancel[K comparable] struct{ Key K }

// Settled reports that no order will start from a stale entry any more. The core returns it once
// per entry.
type Settled[K comparable] struct{ Key K }

func (Load[K]) effect()    {}
func (Wait[K]) effect()    {}
func (Refuse[K]) effect()  {}
func (Unpark) effect()     {}
func (Evict[K]) effect()   {}
func (Forget[K]) effect()  {}
func (Discard[K]) effect() {}
func (Cancel[K]) effect()  {}
func (Settled[K]) effect() {}

// Reason is why an entry is evicted.
type Reason uint8

// The reasons.
const (
	Room     Reason = iota // to make room for a load
	Pressure               // a bound has passed its share
	Unused                 // no deployed function uses it
	Rested                 // it is a worker that was idle for a while
	Asked                  // [Drop]
)

var reasons = [...]string{Room: "room", Pressure: "pressure", Unused: "unused", Rested: "rested", Asked: "asked"}

// String returns the reason as a word.
func (r Reason) String() string { return reasons[r] }
