package dispatch

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// fetchModel plays random tasks, cancels, fetches, answers and ends of replicas over real sockets.
type fetchModel struct {
	*rig

	nodes    *fakeNodes
	r        *rand.Rand
	replica  *replicaModel
	replicas int
	tasks    int
	held     []fetching
	played   sync.WaitGroup
}

// replicaModel plays a replica. Its answer to a call is the call's request.
type replicaModel struct {
	*actor

	mu      sync.Mutex
	batches map[uint64][]string // requests of the calls without an answer, by call; empty: it has one
}

// TestFetchedBatchesAreAnsweredOnce checks that each task gets one reply, and the right one,
// whatever happens while items are fetched.
func TestFetchedBatchesAreAnsweredOnce(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			r := newRig(t, Spec{Batch: 3, QueueLimit: 1000})
			r.shell.bounds.cause = ms
			m := &fetchModel{rig: r, nodes: r.nodes(), r: rand.New(rand.NewPCG(seed, 2))}
			m.attach()
			for range 200 {
				m.step()
			}
			m.end()
		})
	}
}

func (m *fetchModel) attach() {
	m.replicas++
	r := &replicaModel{actor: attach(m.t, m.shell, fmt.Sprint("r", m.replicas), 3, 3), batches: map[uint64][]string{}}
	m.replica = r
	m.played.Go(r.play)
}

// step does something at random.
func (m *fetchModel) step() {
	switch m.r.IntN(10) {
	case 0, 1, 2, 3:
		m.tasks++
		name := fmt.Sprint("k", m.tasks)
		if m.r.IntN(4) == 0 {
			m.submit(name, text(name))
			break
		}
		m.submit(name, m.nodes.item(name))
	case 4, 5:
		m.cancel(fmt.Sprint("k", 1+m.r.IntN(m.tasks+1)))
	case 6, 7:
		m.replica.answerOne(m.r)
	case 8:
		m.fetched()
	default:
		if m.r.IntN(8) == 0 {
			_ = m.replica.conn.Close()
			m.attach()
		}
	}
}

// fetched ends some fetches.
func (m *fetchModel) fetched() {
	for len(m.nodes.fetches) > 0 {
		m.held = append(m.held, <-m.nodes.fetches)
	}
	for len(m.held) > 0 && m.r.IntN(4) > 0 {
		i := m.r.IntN(len(m.held))
		var err error
		if m.r.IntN(5) == 0 {
			err = errGone
		}
		m.held[i].comes <- err
		m.held = slices.Delete(m.held, i, i+1)
	}
}

// end lets all tasks end, and checks their replies.
func (m *fetchModel) end() {
	replies := map[string]int{}
	take := func(r *task.Reply) {
		replies[r.Request]++
		if r.Code == task.OK && string(r.Output[0].Bytes) != r.Request {
			m.t.Errorf("task %s gets the output of %s", r.Request, r.Output[0].Bytes)
		}
	}
	late, tick := time.After(patience), time.NewTicker(ms)
	defer tick.Stop()
	for left := m.tasks; left > 0; {
		select {
		case r := <-m.bus.replies:
			take(r)
			left--
		case f := <-m.nodes.fetches:
			f.comes <- nil
		case <-tick.C:
			m.fetched()
			m.replica.answerOne(m.r)
		case <-late:
			m.t.Fatalf("%d replies are missing after %v", left, patience)
		}
	}
	_ = m.replica.conn.Close()
	m.shell.Close() // waits for everything
	m.played.Wait()
	for len(m.bus.replies) > 0 {
		take(<-m.bus.replies)
	}
	for i := range m.tasks {
		if n := replies[fmt.Sprint("k", i+1)]; n != 1 {
			m.t.Errorf("task k%d has %d replies", i+1, n)
		}
	}
	for len(m.dropped) > 0 {
		if cause := <-m.dropped; !strings.HasSuffix(cause, "connection closed") {
			m.t.Errorf("dropped %s", cause)
		}
	}
}

// play reads frames, and checks their order.
func (r *replicaModel) play() {
	for {
		f, err := r.conn.Read()
		if err != nil {
			return
		}
		r.mu.Lock()
		switch f.Type {
		case wire.FrameBatch:
			b, err := wire.DecodeBatch(f.Payload)
			if err != nil || r.batches[f.Batch] != nil {
				r.t.Errorf("batch %d comes twice, or %v", f.Batch, err)
			}
			for _, c := range b.Calls {
				items, err := wire.Detach(c.Input[0].Items, f.Files)
				if err != nil || string(items[0].Bytes) != c.Key.Request {
					r.t.Errorf("call %s gets %v, %v", c.Key.Request, items, err)
				}
				r.batches[f.Batch] = append(r.batches[f.Batch], c.Key.Request)
			}
		case wire.FrameCancel:
			c, err := wire.DecodeCancelFrame(f.Payload)
			calls := r.batches[f.Batch]
			// The cancel of a call whose answer was on its way may come after all answers.
			if err != nil || calls == nil || c.Index >= len(calls) && slices.ContainsFunc(calls, func(c string) bool { return c != "" }) {
				r.t.Errorf("cancel of call %d of batch %d, which has %d calls (%v)", c.Index, f.Batch, len(calls), err)
			}
		}
		r.mu.Unlock()
		closeFiles(f.Files)
	}
}

// answerOne answers a call, if there is one.
func (r *replicaModel) answerOne(random *rand.Rand) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for batch, calls := range r.batches {
		open := -1
		for i, from := 0, random.IntN(len(calls)); i < len(calls); i++ {
			if at := (from + i) % len(calls); calls[at] != "" {
				open = at
			}
		}
		if open < 0 {
			continue
		}
		payload := wire.Result{Index: open, Output: tensor.Activation{text(calls[open])}}.Append(nil)
		calls[open] = ""
		// Fails if the replica was ended.
		_ = r.conn.Write(wire.Frame{Type: wire.FrameResult, Batch: batch, Payload: payload})
		return
	}
}
