package starts

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
)

// atOnce is part of the names of replicas that several goroutines order together.
const atOnce = "at-once"

// ForksPerSecond orders n replicas from one zygote as fast as possible, and returns the number of
// forks per second.
func (b *Stage) ForksPerSecond(ctx context.Context, n int) (float64, error) {
	took, err := b.AtOnce(ctx, n, 8)
	var all time.Duration
	for _, t := range took {
		all = max(all, t)
	}
	return float64(n) / all.Seconds(), err
}

// AtOnce orders n replicas of the stage from several goroutines. It returns, for each replica, the
// time until it had started. When AtOnce returns, all replicas have ended.
func (b *Stage) AtOnce(ctx context.Context, n, goroutines int) ([]time.Duration, error) {
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
				r, err := b.Keys.Start(ctx, node.Order{Replica: name(i), Spec: b.Spec("fork")}, nil)
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
		if err := b.Keys.Stop(ctx, name(i), time.Minute); err != nil {
			return took, errors.Join(failed, err)
		}
	}
	return took, failed
}
