package main

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/control/lease"
	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// TestOvertakenLeaderAcceptsNothing lets another control plane take over while a leader stores an
// async request. The next leader may have read the journal before. So the client must not be told
// that the request was accepted, and no process may run it.
func TestOvertakenLeaderAcceptsNothing(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	c, err := queue.OpenCluster(t.Context(), queue.ClusterConfig{URLs: natstest.Start(t, 1).URLs(), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	nc, err := c.Connect("test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	kv, err := queue.OpenKV(t.Context(), nc, c.Disk(), "leases")
	if err != nil {
		t.Fatal(err)
	}
	l := &leading{me: "me"}
	keeper, err := lease.Open(t.Context(), lease.KeeperConfig{Store: ownErrors{kv, lease.ErrNone, lease.ErrConflict}, Me: l.me, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { keeper.Close(context.Background()) })
	l.lease = keeper.Lease(controlLease, lease.Options{})
	proctest.Until(t, "the lease", func() bool { _, err := l.epoch(); return err == nil })
	overtaken := false
	l.u = &up{leading: l, nats: c}
	cfg := l.u.journalConfig()
	cfg.Limits, cfg.Found = func(string) queue.Limits { return queue.Limits{Concurrency: 1, Queue: 10} }, nil
	stored, held := 0, cfg.Held
	cfg.Held = func() error {
		stored++
		l.ended.Store(overtaken)
		return held()
	}
	j, err := queue.OpenJournal(t.Context(), nc, cfg, log)
	if err != nil {
		t.Fatal(err)
	}
	l.journal.Store(j)
	if err := (heldJournal{l}).AppendValue("f", "first", []byte("x"), nil); err != nil {
		t.Fatal(err)
	}
	overtaken = true
	if err := (heldJournal{l}).AppendValue("f", "second", []byte("x"), nil); !errors.Is(err, queue.ErrStopped) {
		t.Errorf("a request of an overtaken leader: %v, want ErrStopped", err)
	}
	if s := j.Stats(); s.Accepted != 1 || s.Refused != 1 || stored != 2 {
		t.Errorf("%d records are stored, and %+v; want 2 stored, 1 accepted and 1 refused", stored, s)
	}
	cfg.Held = nil
	if j, err = queue.OpenJournal(t.Context(), nc, cfg, log); err != nil || j.Stats().Resumed != 1 {
		t.Errorf("the next leader finds %d requests, %v; want the accepted one", j.Stats().Resumed, err)
	}
}

// TestLeaderThatMissedAnother gives the lease back to a leader after another control plane has held
// it and has ended. The leader begins again, because it does not know what the other one accepted.
func TestLeaderThatMissedAnother(t *testing.T) {
	l := &leading{me: "me", since: 1}
	l.active.Store(true)
	err := l.follow(t.Context(), lease.State{Holds: true, Epoch: 3, Since: 3, Holder: "me"})
	if !errors.Is(err, errAgain) || !l.ended.Load() {
		t.Errorf("got %v, want errAgain, and no more orders", err)
	}
}

// TestTakingOverIsTriedAgain takes over while the shared state cannot be read for a while.
func TestTakingOverIsTriedAgain(t *testing.T) {
	away := errors.New("no leader")
	for name, tc := range map[string]struct {
		fails int
		held  bool
		limit time.Duration
		want  error
		calls int
	}{
		"at once":           {0, true, time.Minute, nil, 1},
		"later":             {2, true, time.Minute, nil, 3},
		"the lease is lost": {9, false, time.Minute, errNoLease, 1},
		"too late":          {9, true, 0, away, 1},
	} {
		t.Run(name, func(t *testing.T) {
			calls := 0
			err := whileHeld(t.Context(), tc.limit, func() bool { return tc.held }, func() error {
				if calls++; calls > tc.fails {
					return nil
				}
				return away
			})
			if !errors.Is(err, tc.want) || tc.want == nil && err != nil || calls != tc.calls {
				t.Errorf("got %v after %d calls, want %v after %d", err, calls, tc.want, tc.calls)
			}
		})
	}
}
