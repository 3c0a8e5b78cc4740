package dispatch

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// doubted is a core of one replica at a time, r1 first, whose batches have four calls.
type doubted struct {
	t       *testing.T
	c       *Core
	now     time.Duration
	n       int // calls so far
	replica int
	sent    []Send // that wait for their answers
	halved  []int  // the sizes
}

func newDoubted(t *testing.T) *doubted {
	d := &doubted{t: t, c: NewCore(CoreConfig{Function: "f.ns"})}
	d.step(Deployed{Revision: 1, Batch: 4})
	d.up()
	return d
}

func (d *doubted) step(ev Event) {
	d.now += ms
	for _, e := range d.c.Step(at(d.now), ev) {
		switch e := e.(type) {
		case Send:
			d.sent = append(d.sent, e)
		case Halved:
			d.halved = append(d.halved, e.Most)
		}
	}
}

func (d *doubted) up() {
	d.replica++
	d.step(ReplicaUp{Name: fmt.Sprint("r", d.replica), Revision: 1, Slots: 1, MaxBatch: 8})
}

// answer answers the calls of the batch that was sent first.
func (d *doubted) answer() {
	b := d.sent[0]
	d.sent = d.sent[1:]
	for i := range b.Tasks {
		d.step(answer(b.Replica, b.Batch, i))
	}
}

// batch submits four calls, which wait until the replica is idle, and returns the batch that the
// replica gets of them.
func (d *doubted) batch() Send {
	d.t.Helper()
	d.step(submit(fmt.Sprint("lead", d.n), 0)) // occupies the replica while a batch gathers
	for range 4 {
		d.n++
		d.step(submit(fmt.Sprint("call", d.n), time.Hour))
	}
	d.answer()
	return d.sent[0]
}

// drain answers all calls.
func (d *doubted) drain() {
	for len(d.sent) > 0 {
		d.answer()
	}
}

// size returns the size of the next batches, and leaves the replica idle.
func (d *doubted) size() int {
	n := len(d.batch().Tasks)
	d.drain()
	return n
}

// end ends the replica under the batch that it has. Its calls come again.
func (d *doubted) end(how task.End) (calls []*task.Task) {
	calls = d.sent[0].Tasks
	d.sent = nil
	d.step(ReplicaDown{Name: fmt.Sprint("r", d.replica), End: how})
	for _, c := range calls {
		next := *c
		next.Attempt++
		next.Alone = true
		d.step(Submit{&next})
	}
	return calls
}

// has checks the size of batches, and how often it was halved. It leaves the replica idle.
func (d *doubted) has(size, halved int) {
	d.t.Helper()
	survived := 0 // as the autoscaler gets it
	if len(d.halved) > 0 {
		survived = slices.Min(d.halved)
	}
	got, told := d.size(), d.c.Signals(at(d.now)).Survived
	if got != size || len(d.halved) != halved || told != survived {
		d.t.Fatalf("batches of %d after %v, and %d survived, want batches of %d after %d", got, d.halved, told, size, halved)
	}
}

func TestBatchesThatEndReplicasAreHalved(t *testing.T) {
	d := newDoubted(t)
	d.has(4, 0)
	d.batch()
	d.end(task.EndItself)
	d.up()
	for range 4 { // the calls of the batch, each one alone
		if len(d.sent) != 1 || len(d.sent[0].Tasks) != 1 || len(d.halved) > 0 {
			t.Fatalf("batches %v, halved %v, want one of a call alone", d.sent, d.halved)
		}
		d.answer()
	}
	d.drain()
	d.has(2, 1)
	d.batch()
	d.end(task.EndItself)
	d.up()
	d.drain()
	d.has(1, 2)
	if !slices.Equal(d.halved, []int{2, 1}) {
		t.Errorf("halved to %v, want 2 and 1", d.halved)
	}
	d.step(Deployed{Revision: 1, Batch: 4}) // changes nothing
	d.has(1, 2)
	d.halved = nil
	d.step(Deployed{Revision: 1, Batch: 3})
	d.has(3, 0)
}

// TestSmallerBatchesWhileTheCauseIsUnknown checks the batches between the end of a replica and the
// moment when its cause is known.
func TestSmallerBatchesWhileTheCauseIsUnknown(t *testing.T) {
	for name, tc := range map[string]struct {
		end  task.End
		then func(d *doubted)
		want int // size of batches at the end
	}{
		"a call ends replicas": {task.EndItself, func(d *doubted) {
			d.answer()
			if poison := d.end(task.EndItself); len(poison) != 1 { // the second call, alone
				d.t.Fatalf("%d calls on the replica, want one", len(poison))
			}
			d.up()
		}, 4},
		"a call that is killed from outside proves nothing": {task.EndItself, func(d *doubted) {
			d.answer()
			d.end(task.EndUnclear)
			d.up()
		}, 2},
		"killed from outside": {task.EndUnclear, func(*doubted) {}, 4},
		"its zygote ended":    {task.EndShared, func(*doubted) {}, 4},
		"no answers for a minute": {task.EndItself, func(d *doubted) {
			d.answer()
			d.now += doubtLifetime
			d.step(Tick{})
		}, 4},
		"another revision": {task.EndItself, func(d *doubted) { d.step(Deployed{Revision: 2, Batch: 4}) }, 4},
	} {
		t.Run(name, func(t *testing.T) {
			d := newDoubted(t)
			d.batch()
			d.end(tc.end)
			d.up()
			tc.then(d)
			d.drain()
			if got := d.size(); got != tc.want {
				t.Errorf("batches of %d, want %d; halved %v", got, tc.want, d.halved)
			}
		})
	}
	d := newDoubted(t)
	d.batch()
	d.end(task.EndItself)
	d.step(ReplicaUp{Name: "r8", Revision: 1, Slots: 1, MaxBatch: 8})
	for i := range 4 {
		d.step(submit(fmt.Sprint("after", i), 0))
	}
	d.step(ReplicaUp{Name: "r9", Revision: 1, Slots: 1, MaxBatch: 8})
	if len(d.sent) != 2 || len(d.sent[0].Tasks) != 1 || len(d.sent[1].Tasks) != 2 {
		t.Errorf("%v, want a call alone on r8, and a batch of two on r9", d.sent)
	}
}

// TestOldRevisionsCastNoDoubt checks that a replica of an earlier revision says nothing about the
// batches of the present one.
func TestOldRevisionsCastNoDoubt(t *testing.T) {
	d := newDoubted(t)
	d.step(Deployed{Revision: 2, Batch: 4})
	d.batch()
	d.end(task.EndItself)
	d.up()
	d.drain()
	d.has(4, 0)
}
