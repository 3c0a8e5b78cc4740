package running

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// DeployAll deploys functions. It returns when each has its smallest number of replicas ready.
func DeployAll(ctx context.Context, api *client.Client, all []client.Deployment) error {
	for _, d := range all {
		if err := api.Deploy(ctx, d); err != nil {
			return err
		}
	}
	for _, d := range all {
		if err := client.WaitReady(ctx, api, []client.Deployment{d}, io.Discard); err != nil {
			return err
		}
	}
	return nil
}

// Settled waits until no replica of a function is starting.
func Settled(ctx context.Context, api *client.Client, name string) error {
	ctx, cancel := context.WithTimeout(ctx, client.ReadyPatience)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		s, err := api.Status(ctx, name)
		if err != nil {
			return err
		}
		if s.AvailableReplicas == s.Replicas && s.Replicas > 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %d of %d replicas are ready: %w", name, s.AvailableReplicas, s.Replicas, ctx.Err())
		case <-tick.C:
		}
	}
}

// Asleep waits until a function has no replicas. If evict is set, it then evicts the function's
// parameters, which is possible only once their processes have ended.
func Asleep(ctx context.Context, api *client.Client, name string, evict bool) error {
	deadline := time.Now().Add(time.Minute)
	for {
		s, err := api.Status(ctx, name)
		if err != nil {
			return err
		}
		done := s.Replicas == 0 && s.AvailableReplicas == 0
		if done && evict {
			a, err := api.Do(ctx, http.MethodPost, "/system/cache/evict", "application/json", []byte(`{"function":"`+name+`"}`))
			if err != nil {
				return err
			}
			done = a.Status/100 == 2
		}
		if done {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%s still has %d replicas, or processes, after a minute of idleness", name, s.Replicas)
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Saturate sends calls from several clients, and returns how long all calls took together. Each
// client sends its next call after the answer to the last one. The function each, if not nil, gets
// the answers, one at a time.
func Saturate(ctx context.Context, api *client.Client, function, contentType, body string, clients, calls int, each func(client.Answer)) (time.Duration, error) {
	var sent atomic.Int64
	var mu sync.Mutex
	var group sync.WaitGroup
	errs := make([]error, clients)
	begun := time.Now()
	for i := range clients {
		group.Go(func() {
			for sent.Add(1) <= int64(calls) && errs[i] == nil {
				var a client.Answer
				if a, errs[i] = api.Invoke(ctx, function, contentType, []byte(body)); errs[i] == nil && each != nil {
					mu.Lock()
					each(a)
					mu.Unlock()
				}
			}
		})
	}
	group.Wait()
	return time.Since(begun), errors.Join(errs...)
}
