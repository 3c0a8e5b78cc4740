package demand

import (
	"container/list"
	"math"
	"time"
)

// Learner is what was learned about applications. [New] makes one. It is not safe for concurrent
// use.
type Learner struct {
	limits Limits
	apps   map[string]*app
	order  list.List // of *app, the most recently used first
	bytes  int       // of all apps
	turn   uint64    // number of the current request
	forgot uint64
}

// New returns an empty learner.
func New(l Limits) *Learner { return &Learner{limits: l, apps: map[string]*app{}} }

// Add learns from a request that has ended at now. It allocates no memory if it has seen such a
// request before.
func (l *Learner) Add(now time.Time, e *Ended) {
	if len(e.App) > mostText {
		return
	}
	a := l.use(e.App, now)
	w := a.weight(now, l.limits.HalfLife)
	before := a.bytes
	l.turn++
	for i := range e.Calls {
		if k := &e.Calls[i]; len(k.Stage) > mostText || len(k.Function) > mostText {
			continue
		}
		a.add(&e.Calls[i], now, w, l.turn)
	}
	if e.Complete {
		a.complete(e.Edges, w, l.turn)
	}
	a.requests += w
	a.shrink(l.limits.AppBytes)
	l.bytes += a.bytes - before
	l.shrink()
}

// use returns the application as the most recently used one. It creates it if there is none.
func (l *Learner) use(name string, now time.Time) *app {
	a := l.apps[name]
	if a == nil {
		a = &app{name: name, ref: now, last: now, bytes: appSize + len(name)}
		l.apps[name], a.place = a, l.order.PushFront(a)
		l.bytes += a.bytes
		return a
	}
	if now.After(a.last) {
		a.last = now
	}
	l.order.MoveToFront(a.place)
	return a
}

// shrink forgets the least recently used applications until the rest is within the limits. The last
// one stays.
func (l *Learner) shrink() {
	for len(l.apps) > 1 && (len(l.apps) > l.limits.Apps || l.bytes > l.limits.Bytes) {
		l.forget(l.order.Back().Value.(*app))
		l.forgot++
	}
}

func (l *Learner) forget(a *app) {
	l.order.Remove(a.place)
	delete(l.apps, a.name)
	l.bytes -= a.bytes
}

// Bytes returns how much memory the applications take.
func (l *Learner) Bytes() int { return l.bytes }

// Apps returns the number of applications.
func (l *Learner) Apps() int { return len(l.apps) }

// Forgotten returns how many applications were forgotten because of the limits.
func (l *Learner) Forgotten() uint64 { return l.forgot }

// Merge adds what another learner has learned. Both must have the same half-life. The other learner
// must not be used any more. Its applications count as used when they were last used, so of all
// applications, the most recently used stay.
func (l *Learner) Merge(o *Learner) {
	for e := o.order.Back(); e != nil; e = e.Prev() { // the most recently used last
		from := e.Value.(*app)
		a := l.apps[from.name]
		if a == nil {
			from.place = l.insert(from)
			l.apps[from.name] = from
			from.shrink(l.limits.AppBytes)
			l.bytes += from.bytes
		} else {
			before := a.bytes
			a.merge(from, l.limits.HalfLife)
			l.order.Remove(a.place)
			a.place = l.insert(a)
			a.shrink(l.limits.AppBytes)
			l.bytes += a.bytes - before
		}
	}
	l.shrink()
}

// insert places an application in the order of last uses. Ties go by name.
func (l *Learner) insert(a *app) *list.Element {
	for e := l.order.Front(); e != nil; e = e.Next() {
		if o := e.Value.(*app); a.last.After(o.last) || a.last.Equal(o.last) && a.name < o.name {
			return l.order.InsertBefore(a, e)
		}
	}
	return l.order.PushBack(a)
}

// mostDoublings bounds the weight of a new call, as a power of two. Beyond it, the weights of the
// application's earlier calls shrink instead.
const mostDoublings = 16

// weight returns the weight of a call at now, relative to calls at a.ref (forward decay; Cormode,
// Shkapenyuk, Srivastava and Xu, ICDE 2009). If the clock was set back, the call counts like the
// latest one; if by more than a half-life, earlier calls count as if they were of now.
func (a *app) weight(now time.Time, halfLife time.Duration) float64 {
	doublings := float64(now.Sub(a.ref)) / float64(halfLife)
	switch {
	case doublings > mostDoublings:
		a.rebase(now, halfLife)
		return 1
	case doublings < -1:
		a.ref, a.last = now, now
	}
	return math.Exp2(max(doublings, 0))
}

// rebase makes weights relative to calls at now.
func (a *app) rebase(now time.Time, halfLife time.Duration) {
	if !now.After(a.ref) {
		return
	}
	a.scale(math.Exp2(-min(float64(now.Sub(a.ref))/float64(halfLife), 4*mostDoublings)))
	a.ref = now
}
