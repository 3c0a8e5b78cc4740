package dispatch

import (
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// BenchmarkStep measures a task's way through the Core, from Submit to Reply, while n other tasks
// wait.
//
//	go test -run '^$' -bench . -count 10 ./request/dispatch | benchstat -
func BenchmarkStep(b *testing.B) {
	for _, waiting := range []int{0, 100, 10_000} {
		b.Run(fmt.Sprintf("waiting=%d", waiting), func(b *testing.B) {
			c := NewCore(CoreConfig{Function: "f.ns", QueueLimit: waiting + 2})
			for i := range 10 {
				c.Step(epoch, ReplicaUp{Name: fmt.Sprint("r", i), Slots: 1, MaxBatch: 1})
			}
			now, n := epoch, uint32(0)
			submit := func() []Effect {
				n++
				now = now.Add(time.Microsecond)
				t := &task.Task{Key: task.Key{Request: "request", Task: n, Attempt: 1}, Deadline: now.Add(time.Minute)}
				return c.Step(now, Submit{t})
			}
			for range 10 + waiting {
				submit()
			}
			reply := &task.Reply{}
			oldest := uint64(1)
			b.ReportAllocs()
			for b.Loop() {
				submit()
				*reply = task.Reply{}
				c.Step(now, Result{Replica: c.owner(oldest), Batch: oldest, Reply: reply})
				oldest++
			}
		})
	}
}

// owner returns the name of the replica that has a batch.
func (c *Core) owner(id uint64) string {
	for _, r := range c.lanes[0].replicas {
		for _, b := range r.batches {
			if b.id == id {
				return r.name
			}
		}
	}
	return ""
}

// echoBus sends each reply to a channel, without decoding it.
type echoBus struct {
	handler func([]byte, bool)
	replies chan struct{}
}

func (e *echoBus) Tasks(_ string, handler func([]byte, bool)) (func(), error) {
	e.handler = handler
	return func() {}, nil
}

func (e *echoBus) Reply(string, []byte) error {
	e.replies <- struct{}{}
	return nil
}

// BenchmarkShell measures a task's way from its message over a replica's socket to the reply's
// message. The replica answers at once. n tasks are in progress at a time.
func BenchmarkShell(b *testing.B) {
	for _, inflight := range []int{1, 16} {
		b.Run(fmt.Sprintf("inflight=%d", inflight), func(b *testing.B) {
			store, err := tensor.OpenDir(b.TempDir(), 1<<20)
			if err != nil {
				b.Fatal(err)
			}
			bus := &echoBus{replies: make(chan struct{}, inflight)}
			s, err := New(Config{Bus: bus, Store: store, Logger: slog.New(slog.DiscardHandler), Registerer: prometheus.NewRegistry()})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			if err := s.Ensure(Spec{Function: pipeline.ParseKey("f.ns")}); err != nil {
				b.Fatal(err)
			}
			a := attach(b, s, "f-1", 4, 1)
			go func() {
				out := wire.Result{Service: ms, Output: tensor.Activation{text("echo")}}.Append(nil)
				for {
					f, err := a.conn.Read()
					if err != nil {
						return
					}
					if _, err := wire.DecodeBatch(f.Payload); err != nil {
						panic(err)
					}
					if a.conn.Write(wire.Frame{Type: wire.FrameResult, Batch: f.Batch, Payload: out}) != nil {
						return
					}
				}
			}()
			in := task.Task{
				Key: task.Key{Request: "01J9ZQ4M9Z5W0X7T3K2V8R6C1D", Attempt: 1}, Function: "f.ns", ReplyTo: "_INBOX.abcdefghij",
				Deadline: time.Now().Add(time.Hour), Input: tensor.Input{{Items: tensor.Activation{text("hello")}}},
			}
			submit := func() {
				in.Task++
				bus.handler(wire.AppendTask(nil, &in), false)
			}
			for range inflight - 1 {
				submit()
			}
			b.ReportAllocs()
			for b.Loop() {
				submit()
				<-bus.replies
			}
		})
	}
}

// BenchmarkSignals measures what control reads of a function at each tick.
func BenchmarkSignals(b *testing.B) {
	c := NewCore(CoreConfig{Function: "f.ns"})
	c.Step(epoch, ReplicaUp{Name: "r1", Slots: 4, MaxBatch: 8})
	now := epoch
	for i := range uint64(20_000) {
		now = now.Add(ms)
		c.Step(now, submit(fmt.Sprint(i), 0))
		if i >= 3 {
			c.Step(now, answer("r1", i-2, 0))
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		c.Signals(now)
	}
}
