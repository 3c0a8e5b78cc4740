package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// Times of takeOverShared. NATS needs up to 9 s to choose the leaders of its streams.
const (
	readLimit = 20 * time.Second
	readAgain = 250 * time.Millisecond
)

// takeOverShared takes over the data that control planes share, for a process that has just got the
// lease. It reads the learned demand, takes the lead of secrets, and opens the journal with open.
// It tries again while streams have no leader. It returns errNoLease if this process loses the
// lease meanwhile.
func takeOverShared(ctx context.Context, l *leading, open func() (*queue.Journal, error)) (*queue.Journal, error) {
	var j *queue.Journal
	warn := sync.OnceFunc(func() { l.u.log.Warn("failed to read the data that control planes share; trying again") })
	held := func() bool { _, ok := l.lease.Epoch(); return ok }
	err := whileHeld(ctx, readLimit, held, func() (err error) {
		if j, err = tryTakeOverShared(ctx, l, open); err != nil {
			l.u.log.Debug("failed to read the data that control planes share", "error", err)
			warn()
		}
		return err
	})
	return j, err
}

// whileHeld calls f until it succeeds, the limit is over, or ctx ends. It returns errNoLease once
// this process does not hold the lease any more.
func whileHeld(ctx context.Context, limit time.Duration, held func() bool, f func() error) error {
	for until := time.Now().Add(limit); ; {
		err := f()
		switch {
		case err == nil:
			return nil
		case !held():
			return fmt.Errorf("%w: %w", errNoLease, err)
		case ctx.Err() != nil || time.Now().After(until):
			return err
		}
		select {
		case <-time.After(readAgain):
		case <-ctx.Done():
		}
	}
}

// tryTakeOverShared is one attempt of takeOverShared.
func tryTakeOverShared(ctx context.Context, l *leading, open func() (*queue.Journal, error)) (*queue.Journal, error) {
	if err := l.u.demand.Reload(ctx); err != nil { // the earlier leader has learned more
		return nil, err
	}
	if c := l.copies.Load(); c != nil {
		if err := c.Lead(ctx); err != nil {
			return nil, err
		}
	}
	return open()
}

// heldJournal implements admin.Journal, and the gateway's journal's part in NATS.
type heldJournal struct{ *leading }

// of returns the journal, or an error if another process has it.
func (h heldJournal) of() (*queue.Journal, error) {
	if j := h.journal.Load(); j != nil {
		return j, nil
	}
	return nil, fmt.Errorf("%w: %w", queue.ErrStopped, errNoLease)
}

// held returns the journal, or an error if this process does not hold the lease now.
func (h heldJournal) held() (*queue.Journal, error) {
	j, err := h.of()
	if err != nil {
		return nil, err
	}
	if _, err := h.epoch(); err != nil {
		return nil, fmt.Errorf("%w: %w", queue.ErrStopped, err)
	}
	return j, nil
}

// AppendValue is queue.Journal.AppendValue.
func (h heldJournal) AppendValue(function, id string, data []byte, value any) error {
	j, err := h.held()
	if err != nil {
		return err
	}
	return j.AppendValue(function, id, data, value)
}

// Times of stillHeld.
const (
	lapseLimit = 5 * time.Second
	lapseAgain = 50 * time.Millisecond
)

// stillHeld returns nil if no other process can have read the journal before a record was stored in
// it. While nobody holds the lease, it waits. After an error, the journal withdraws the record.
func (h heldJournal) stillHeld() error {
	for until := time.Now().Add(lapseLimit); ; time.Sleep(lapseAgain) {
		_, err := h.epoch()
		if err == nil {
			return nil
		}
		if errors.Is(err, node.ErrOldEpoch) || time.Now().After(until) {
			return err
		}
	}
}

// Dead implements admin.Journal.
func (h heldJournal) Dead(wanted func(function string) bool, after string, limit int) ([]queue.DeadLetter, bool, error) {
	j, err := h.of()
	if err != nil {
		return nil, false, err
	}
	return j.Dead(wanted, after, limit)
}

// DeadLetter implements admin.Journal.
func (h heldJournal) DeadLetter(ctx context.Context, id string) (queue.DeadLetter, []byte, error) {
	j, err := h.of()
	if err != nil {
		return queue.DeadLetter{}, nil, err
	}
	return j.DeadLetter(ctx, id)
}

// Redrive implements admin.Journal.
func (h heldJournal) Redrive(ctx context.Context, id string) error {
	j, err := h.held()
	if err != nil {
		return err
	}
	return j.Redrive(ctx, id)
}

// DropDead implements admin.Journal.
func (h heldJournal) DropDead(id string) error {
	j, err := h.held()
	if err != nil {
		return err
	}
	return j.DropDead(id)
}
