package lease

import (
	"time"
)

// Times of a lease.
const (
	TTL  = 3 * time.Second // silence after which others may take a lease
	Beat = time.Second     // between two writes of a holder
	// Skew is the share by which the rates of two clocks may differ. A holder gives up that much
	// earlier.
	Skew = 0.1
	// hold is how long a holder may act after it sent its latest write.
	hold = TTL - time.Duration(Skew*float64(TTL))
	// readAgain is the silence after which a process that waits reads the record itself, because
	// watching may have failed.
	readAgain = Beat + Beat/2
	// writeLimit is how long a write may take. After it, the write is sent again.
	writeLimit = Beat
	retryAgain = Beat / 4 // pause after a write that failed
)

// Record is the stored form of a lease.
type Record struct {
	V      int    `json:"v"`                // 1
	Holder string `json:"holder,omitempty"` // id of the process; empty: nobody holds it
	// Where is what others need to know of the holder, such as its address.
	Where string `json:"where,omitempty"`
	// Knows has the features of the holder, separated by spaces. Processes of earlier releases write
	// none.
	Knows string `json:"knows,omitempty"`
	Epoch uint64 `json:"epoch"` // of the latest holding
	Beat  uint64 `json:"beat"`  // number of the holder's write
}

// Version is that of all records.
const Version = 1

// Event is an input of a [Core]: one of [Seen], [Wrote], [Failed], [Stand], [Release] and [Tick].
type Event interface{ event() }

// Seen reports the record as it is stored, or was: revisions may be reported twice and out of
// order. Revision 0 means that there is none.
type Seen struct {
	Record   Record
	Revision uint64
}

// Wrote reports that a write was stored.
type Wrote struct{ Beat, Revision uint64 }

// Failed reports that a write was not stored, or that nobody knows. Conflict means that the record
// had another revision.
type Failed struct {
	Beat     uint64
	Conflict bool
}

// Stand says whether this process takes the lease when it is free. It does not give up a lease that
// it holds.
type Stand struct{ Passive bool }

// Release gives the lease up, and does not take it again.
type Release struct{}

// Tick reports that time has passed; see [Wake].
type Tick struct{}

func (Seen) event()    {}
func (Wrote) event()   {}
func (Failed) event()  {}
func (Stand) event()   {}
func (Release) event() {}
func (Tick) event()    {}

// Effect is an output of a [Core]: one of [Write], [Read], [Held], [Lapsed], [Freed] and [Wake].
type Effect interface{ effect() }

// Write replaces the record, if it has this revision; 0: if there is none. The result is reported
// with Wrote or Failed.
type Write struct {
	Record   Record
	Revision uint64
}

// Read asks for the record. It is reported with Seen.
type Read struct{}

// Held means that this process holds the lease from now on, with this epoch.
type Held struct{ Epoch uint64 }

// Lapsed means that this process does not hold the lease any more. Until it has seen another
// holder, it tries to take the lease again.
type Lapsed struct{}

// Freed follows a Release once no record says that this process holds the lease.
type Freed struct{}

// Wake asks for a Tick at this time.
type Wake struct{ At time.Duration }

func (Write) effect()  {}
func (Read) effect()   {}
func (Held) effect()   {}
func (Lapsed) effect() {}
func (Freed) effect()  {}
func (Wake) effect()   {}

// Config configures a Core.
type Config struct {
	Me    string // id of this process, which no other process ever has
	Where string // see Record
	Knows string // see Record
	// Passive: this process follows the lease and does not take it.
	Passive bool
	// First returns the least epoch that a new holding may have. So epochs rise even if the store was
	// emptied: the Unix time will do. nil: 1.
	First func() uint64
}

// Core is one process's view of one lease. Times are of a clock that only runs forward, of this
// process alone. It is not safe for concurrent use.
type Core struct {
	cfg Config

	record   Record
	revision uint64 // of record; 0: none is known
	seen     time.Duration
	asked    time.Duration // time of the latest Read
	known    bool          // something was seen
	doubt    bool          // a write has found another revision than the latest that was seen
	top      uint64        // highest epoch that was seen

	holds    bool
	until    time.Duration // end of the holding, if holds
	first    uint64        // epoch of the first holding since another process may have held the lease
	released bool
	freeing  bool // the lease was released, and the record may still name this process
	// The latest write that frees the lease: its number (0: none was sent), and the revision that it
	// replaces.
	freeBeat, freeRevision uint64

	beat    uint64        // number of the latest write
	sent    time.Duration // when it was sent
	sending bool          // it has not ended
	failed  bool          // the latest write that has ended
	pending []attempt     // writes that may have been stored, for Seen
}

// attempt is a write that was sent.
type attempt struct {
	beat, epoch uint64
	first       uint64 // see Core
	sent        time.Duration
}

// NewCore returns a Core that knows nothing yet. Its first event is a Tick.
func NewCore(cfg Config) *Core {
	if cfg.First == nil {
		cfg.First = func() uint64 { return 1 }
	}
	return &Core{cfg: cfg, asked: -readAgain, sent: -Beat}
}

// Holds reports whether this process holds the lease at a time, and with which epoch. It may be
// called any number of times, for times that are not before the latest event.
func (c *Core) Holds(now time.Duration) (epoch uint64, ok bool) {
	return c.record.Epoch, c.holds && now < c.until
}

// Since returns the epoch of the first of this process's holdings after which no other process has
// held the lease. It is the latest epoch if another process may have held the lease in between.
func (c *Core) Since() uint64 { return c.first }

// Holder returns the latest record that this process has seen or written.
func (c *Core) Holder() Record { return c.record }

// Step applies an event and returns what to do.
func (c *Core) Step(now time.Duration, ev Event) []Effect {
	var out []Effect
	wasFreeing := c.freeing
	if c.holds && now >= c.until {
		out = append(out, c.lapse()...)
	}
	switch e := ev.(type) {
	case Seen:
		out = append(out, c.see(now, e)...)
	case Wrote:
		if e.Beat == c.freeBeat {
			c.freeing = false
		}
		for _, a := range c.pending {
			if a.beat == e.Beat {
				out = append(out, c.stored(now, a, e.Revision)...)
				break
			}
		}
		c.ended(e.Beat, false)
	case Failed:
		c.ended(e.Beat, true)
		if e.Conflict {
			// A later write that was stored explains the refusal of an earlier one.
			c.doubt = c.forget(e.Beat) || e.Beat == c.freeBeat || c.doubt
			out = c.read(now, out)
		}
	case Stand:
		c.cfg.Passive = e.Passive
	case Release:
		if c.released {
			break
		}
		c.released = true
		c.freeing = c.holds || c.sending || c.record.Holder == c.cfg.Me
		if c.holds {
			out = append(out, c.lapse()...)
			out = append(out, c.giveUp(now))
		}
		if !c.freeing {
			out = append(out, Freed{})
		}
	case Tick:
	}
	if c.released {
		return append(out, c.actReleased(now, wasFreeing)...)
	}
	return append(out, c.act(now)...)
}

func (c *Core) lapse() []Effect {
	c.holds = false
	return []Effect{Lapsed{}}
}

func (c *Core) read(now time.Duration, out []Effect) []Effect {
	c.asked = now
	return append(out, Read{})
}

// ended notes that a write does not run any more.
func (c *Core) ended(beat uint64, failed bool) {
	if beat == c.beat {
		c.sending, c.failed = false, failed
	}
}

// forget drops a write. It returns false if the write is known to be stored, or older than one that
// is.
func (c *Core) forget(beat uint64) bool {
	for i, a := range c.pending {
		if a.beat == beat {
			c.pending = append(c.pending[:i:i], c.pending[i+1:]...)
			return true
		}
	}
	return false
}

// see takes a record. Only a new revision says that its holder lives. If a write has found another
// revision, an older one counts too: the store may have been emptied.
func (c *Core) see(now time.Duration, e Seen) []Effect {
	if c.known && (e.Revision == c.revision || e.Revision < c.revision && !c.doubt) {
		return nil
	}
	for _, a := range c.pending {
		if e.Record.Holder == c.cfg.Me && a.beat == e.Record.Beat && a.epoch == e.Record.Epoch {
			return c.stored(now, a, e.Revision) // the write's own answer was lost, or comes later
		}
	}
	var out []Effect
	if c.holds {
		out = c.lapse() // someone else has written
	}
	if e.Revision == 0 && c.known { // a holder may not know yet that its record is gone
		e.Record = Record{Holder: "unknown"}
	}
	// A write that was forgotten: it names the revision of the record that it replaced, and this
	// process has named none that is later than the known one. So nobody has written in between.
	follows := c.known && e.Revision > c.revision && e.Record.Holder == c.cfg.Me && c.record.Holder == c.cfg.Me
	c.known, c.doubt, c.record, c.revision, c.seen = true, false, e.Record, e.Revision, now
	if !follows {
		c.first = 0
	}
	c.top = max(c.top, e.Record.Epoch)
	return out
}

// stored takes a write of this process that was stored.
func (c *Core) stored(now time.Duration, a attempt, revision uint64) []Effect {
	if revision <= c.revision {
		return nil // known already, or overtaken
	}
	c.known, c.doubt, c.revision, c.seen, c.top, c.first = true, false, revision, now, max(c.top, a.epoch), a.first
	was := c.holds && c.record.Epoch == a.epoch
	c.record = Record{V: Version, Holder: c.cfg.Me, Where: c.cfg.Where, Knows: c.cfg.Knows, Epoch: a.epoch, Beat: a.beat}
	for len(c.pending) > 0 && c.pending[0].beat <= a.beat {
		c.pending = c.pending[1:]
	}
	if c.released || now >= a.sent+hold {
		return nil // too late: it says only that nobody else holds the lease
	}
	c.until = a.sent + hold
	if was {
		return nil
	}
	c.holds = true
	return []Effect{Held{a.epoch}}
}

// act returns the effects that are due, and a Wake for the next one.
func (c *Core) act(now time.Duration) []Effect {
	if c.sending && now >= c.sent+writeLimit {
		c.sending, c.failed = false, true
	}
	var out []Effect
	if !c.holds && now >= max(c.seen, c.asked)+readAgain || !c.known && now >= c.asked+readAgain {
		out = c.read(now, out)
	}
	silent := max(c.seen, c.asked) + readAgain // end of the silence
	if !c.known || c.cfg.Passive && !c.holds {
		return append(out, Wake{silent})
	}
	at, epoch := c.due()
	if !c.sending && now >= at {
		out = append(out, c.write(now, epoch))
		at = now + Beat
	}
	if c.sending {
		at = max(at, c.sent+writeLimit)
	}
	if c.holds {
		return append(out, Wake{min(at, c.until)})
	}
	return append(out, Wake{min(at, silent)})
}

// giveUp returns a write of the record without its holder.
func (c *Core) giveUp(now time.Duration) Effect {
	r := c.record
	r.Holder, r.Where, r.Knows = "", "", ""
	c.beat++
	c.freeBeat, c.freeRevision, c.sent, c.sending = c.beat, c.revision, now, true
	r.Beat = c.beat
	return Write{r, c.revision}
}

// actReleased goes on to free a lease that was released. A renewal that was under way may be stored
// before the write that frees the lease, which then finds another revision.
func (c *Core) actReleased(now time.Duration, wasFreeing bool) []Effect {
	if c.sending && now >= c.sent+writeLimit {
		c.sending = false
	}
	if c.record.Holder != c.cfg.Me && (c.freeBeat != 0 || !c.sending) {
		c.freeing = false
	}
	if !c.freeing {
		if wasFreeing {
			return []Effect{Freed{}}
		}
		return nil
	}
	if c.sending {
		return []Effect{Wake{c.sent + writeLimit}}
	}
	if again := c.sent + retryAgain; c.revision == c.freeRevision && now < again {
		return []Effect{Wake{again}}
	}
	return []Effect{c.giveUp(now), Wake{now + writeLimit}}
}

// due returns when this process may write next, and with which epoch.
func (c *Core) due() (at time.Duration, epoch uint64) {
	next := max(c.top+1, c.cfg.First())
	again := c.sent + retryAgain
	switch {
	case c.holds && c.failed:
		return again, c.record.Epoch
	case c.holds:
		return c.sent + Beat, c.record.Epoch
	case c.record.Holder == "" || c.record.Holder == c.cfg.Me:
		return again, next // it is free, or was mine and nobody has taken it
	}
	return max(again, c.seen+TTL), next
}

// mostPending bounds the writes whose fate is unknown. An older one cannot make a holding any more.
const mostPending = 8

func (c *Core) write(now time.Duration, epoch uint64) Effect {
	c.beat++
	c.sent, c.sending = now, true
	first := epoch
	if c.record.Holder == c.cfg.Me && c.first > 0 { // the write replaces this record, or fails
		first = c.first
	}
	if c.pending = append(c.pending, attempt{c.beat, epoch, first, now}); len(c.pending) > mostPending {
		c.pending = c.pending[1:]
	}
	return Write{Record{V: Version, Holder: c.cfg.Me, Where: c.cfg.Where, Knows: c.cfg.Knows, Epoch: epoch, Beat: c.beat}, c.revision}
}
