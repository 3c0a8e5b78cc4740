package copies

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// list lists the values of this process that choose accepts, and returns their names. r is the zero
// record for a value that the list does not know.
func (c *Copies) list(ctx context.Context, choose func(is held, r record) bool) (keys []string, err error) {
	c.changing.Lock()
	defer c.changing.Unlock()
	c.mu.Lock()
	all, listed := maps.Clone(c.held), maps.Clone(c.listed)
	c.mu.Unlock()
	var errs []error
	for _, key := range slices.Sorted(maps.Keys(all)) {
		is, r := all[key], listed[key]
		if !choose(is, r) {
			continue
		}
		r.V, r.Version, r.Sum, r.Deleted = 1, max(is.version, 1), is.sum, false
		err := c.write(ctx, key, r)
		if errors.Is(err, ErrConflict) {
			continue // another control plane has listed its own
		}
		if err == nil {
			keys = append(keys, key)
			c.cfg.Log.Info("secret of this control plane is in the list of all control planes now", "secret", key)
		}
		errs = append(errs, err)
	}
	return keys, errors.Join(errs...)
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
	_, err := c.list(ctx, unlisted)
	return err
}

// again lists changes that could not be listed at first, if this process leads. It returns the
// error, and logs it if it is not the one that was logged before.
func (c *Copies) again(before string) string {
	if !c.cfg.Leads() {
		return ""
	}
	keys, err := c.list(c.ctx, unlisted)
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
