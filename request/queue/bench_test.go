package queue

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"

	"github.com/nats-io/nats.go"
)

// benchConn returns a connection to a new server.
func benchConn(b *testing.B) *nats.Conn {
	s, err := StartServer(ServerConfig{Dir: b.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(s.Close)
	nc, err := s.Connect("bench")
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(nc.Close)
	disks.Store(nc, s.Disk())
	return nc
}

// appendAll appends b.N records from 16 clients, each of which waits for the disk.
func appendAll(b *testing.B, j *Journal, bytes int) {
	data := make([]byte, bytes)
	var wg sync.WaitGroup
	b.ResetTimer()
	for w := range 16 {
		wg.Go(func() {
			for i := w; i < b.N; i += 16 {
				if err := j.Append("f.openfaas-fn", fmt.Sprintf("0123456789abcdef-%d", i), data); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// BenchmarkJournalAppend measures accepted records per second. Nobody works on them.
func BenchmarkJournalAppend(b *testing.B) {
	for _, size := range []int{300, 4 << 10} {
		b.Run(fmt.Sprint("bytes=", size), func(b *testing.B) {
			j := openJournal(b, benchConn(b), JournalConfig{Bytes: 8 << 30, Limits: func(string) Limits { return Limits{64, 1 << 30} }})
			appendAll(b, j, size)
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "/s")
		})
	}
}

// BenchmarkJournal measures done records per second, with workers that run at the same time.
func BenchmarkJournal(b *testing.B) {
	j := openJournal(b, benchConn(b), JournalConfig{Limits: func(string) Limits { return Limits{64, 1 << 30} }})
	work(b, j, func(context.Context, Record) End { return End{} })
	appendAll(b, j, 300)
	empty(b, j)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "/s")
}

func BenchmarkBusRoundTrip(b *testing.B) {
	bus := NewBus(benchConn(b))
	got := make(chan struct{}, 1)
	inbox, stop, err := bus.Inbox(func([]byte) { got <- struct{}{} })
	if err != nil {
		b.Fatal(err)
	}
	defer stop()
	stopTasks, err := bus.Tasks("f", func(m []byte, _ bool) { _ = bus.Reply(inbox, m) })
	if err != nil {
		b.Fatal(err)
	}
	defer stopTasks()
	msg := make([]byte, 200)
	for b.Loop() {
		if err := bus.Submit("f", msg); err != nil {
			b.Fatal(err)
		}
		<-got
	}
}
