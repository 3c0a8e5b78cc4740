package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
)

// atOnce is in the names of replicas that are ordered by many at a time.
const atOnce = "at-once"

// forksPerSecond has one zygote fork n replicas, as fast as their orders come, and returns how many it forked in a second.
func (b *benchStage) forksPerSecond(ctx context.Context, n int) (float64, error) {
	took, err := b.atOnce(ctx, n, 8)
	var all time.Duration
	for _, t := range took {
		all = max(all, t)
	}
	return float64(n) / all.Seconds(), err
}

// atOnce orders n replicas of the stage from so many goroutines and tells when each was there, since the beginning. They end at
// once, and it returns when they have.
func (b *benchStage) atOnce(ctx context.Context, n, goroutines int) ([]time.Duration, error) {
	took := make([]time.Duration, n)
	next := make(chan int, n)
	for i := range n {
		next <- i
	}
	close(next)
	var wg sync.WaitGroup
	var once sync.Once
	var failed error
	b.n++
	name := func(i int) string { return fmt.Sprintf("%d-%s-%d", b.n, atOnce, i) }
	begin := time.Now()
	for range goroutines {
		wg.Go(func() {
			for i := range next {
				r, err := b.keys.Start(ctx, keysmanager.Order{Replica: name(i), Spec: b.spec("fork")})
				if err != nil {
					once.Do(func() { failed = err })
					return
				}
				took[i] = time.Since(begin)
				_ = r.Conn.Close()
			}
		})
	}
	wg.Wait()
	for i := range n {
		if err := b.keys.Stop(ctx, name(i), time.Minute); err != nil {
			return took, errors.Join(failed, err)
		}
	}
	return took, failed
}
