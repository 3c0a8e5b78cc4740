package queue

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
)

// BenchmarkJournalAppend has 16 clients that each wait for the disk; /s is records accepted. None are worked on.
func BenchmarkJournalAppend(b *testing.B) {
	for _, size := range []int{300, 4 << 10} {
		b.Run(fmt.Sprint("bytes=", size), func(b *testing.B) {
			s, err := StartServer(ServerConfig{Dir: b.TempDir(), Log: slog.New(slog.DiscardHandler)})
			if err != nil {
				b.Fatal(err)
			}
			defer s.Close()
			nc, err := s.Connect("bench")
			if err != nil {
				b.Fatal(err)
			}
			defer nc.Close()
			j := openJournal(b, nc, JournalConfig{Bytes: 8 << 30, Limits: func(string) Limits { return Limits{64, 1 << 30} }})
			data := make([]byte, size)
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
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "/s")
		})
	}
}

// BenchmarkJournal has them worked on at the same time; /s is records done.
func BenchmarkJournal(b *testing.B) {
	s, err := StartServer(ServerConfig{Dir: b.TempDir(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	defer s.Close()
	nc, err := s.Connect("bench")
	if err != nil {
		b.Fatal(err)
	}
	defer nc.Close()
	j := openJournal(b, nc, JournalConfig{Limits: func(string) Limits { return Limits{64, 1 << 30} }})
	work(b, j, func(context.Context, Record) End { return End{} })
	data := make([]byte, 300)
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
	empty(b, j)
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "/s")
}
