package copies

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// chooser decides whether a value of this process must be listed. r is the zero record for a value
// that the list does not know.
type chooser func(is held, r record) bool

// list adds the values of this process that choose accepts to the list, and returns their keys. It
// locks each key with lock. If lock returns neither a function nor an error, list skips the key.
func (c *Copies) list(ctx context.Context, lock func(ctx context.Context, key string) (unlock func(), err error), choose chooser) (keys []string, err error) {
	c.mu.Lock()
	all := slices.Sorted(maps.Keys(c.held))
	c.mu.Unlock()
	var errs []error
	for _, key := range all {
		if _, chosen := choose.of(c, key); !chosen {
			continue
		}
		unlock, err := lock(ctx, key)
		if err == nil && unlock != nil {
			var done bool
			if done, err = choose.list(ctx, c, key); done {
				keys = append(keys, key)
			}
			unlock()
		}
		errs = append(errs, err)
	}
	return keys, errors.Join(errs...)
}

// of returns the record with which a value would be listed, if choose accepts the value.
func (choose chooser) of(c *Copies, key string) (r record, chosen bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	is, there := c.held[key]
	r = c.listed[key]
	if !there || !choose(is, r) {
		return r, false
	}
	r.V, r.Version, r.Sum, r.Deleted = 1, max(is.version, 1), is.sum, false
	return r, true
}

// list adds a value to the list if choose still accepts the value. The caller holds the key's lock.
func (choose chooser) list(ctx context.Context, c *Copies, key string) (done bool, err error) {
	r, chosen := choose.of(c, key)
	if !chosen {
		return false, nil
	}
	err = c.write(ctx, key, r)
	if errors.Is(err, ErrConflict) {
		return false, nil // another control plane has listed its own value
	}
	if err == nil {
		c.cfg.Log.Info("secret of this control plane is in the list of all control planes now", "secret", key)
	}
	return err == nil, err
}

// write stores a record on top of its revision.
func (c *Copies) write(ctx context.Context, key string, r record) error {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if r.revision, err = c.cfg.List.Replace(ctx, key, b, r.revision); err != nil {
		return err
	}
	c.mu.Lock()
	if c.listed[key].revision < r.revision {
		c.listed[key] = r
	}
	c.mu.Unlock()
	c.Poke()
	return nil
}

// unlisted accepts values whose change is not in the list. An earlier leader ended before it could
// list them, or the list could not be changed. A new secret of a change has no record, or that of
// its deletion.
func unlisted(is held, r record) bool { return is.version > r.Version }

// Lead lists the values whose change was under way when the earlier leader ended. A process calls
// it when it begins to lead.
func (c *Copies) Lead(ctx context.Context) error {
	_, err := c.list(ctx, c.order.Lock, unlisted)
	return err
}

// again lists changes that could not be listed at first, if this process leads. It returns the
// error, and logs it if it is not the one that was logged before.
func (c *Copies) again(before string) string {
	if !c.cfg.Leads() {
		return ""
	}
	idle := func(_ context.Context, key string) (func(), error) {
		unlock, _ := c.order.TryLock(key) // a change that is still running lists its value itself
		return unlock, nil
	}
	keys, err := c.list(c.ctx, idle, unlisted)
	for _, key := range keys {
		c.cfg.Stored(split(key))
	}
	if err == nil || c.ctx.Err() != nil {
		return ""
	}
	if err.Error() != before {
		c.cfg.Log.Warn("a change of a secret is not in the list of all control planes yet", "error", err)
	}
	return err.Error()
}

// latest returns the record of a secret as it is stored; the zero record if there is none.
func latest(ctx context.Context, l List, key string) (record, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	b, revision, err := l.Get(ctx, key)
	if errors.Is(err, ErrNone) {
		return record{}, nil
	}
	var r record
	if err == nil {
		r, err = decode(b)
	}
	if err != nil {
		return record{}, fmt.Errorf("list of secrets: %w", err)
	}
	r.revision = revision
	return r, nil
}
