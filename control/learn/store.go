package learn

import (
	"context"
	"strconv"

	"github.com/stagecoach-serving/stagecoach/demand"
)

// load reads the stored records.
func (d *Demand) load(ctx context.Context) error {
	var found []Entry
	loaded := false
	stop, err := d.cfg.Store.Watch(ctx, func(e Entry) {
		if !loaded {
			found = append(found, e)
		}
	})
	if err != nil {
		return err
	}
	stop() // f does not run any more
	loaded = true
	for _, e := range found {
		shard, err := strconv.Atoi(e.Key)
		if err != nil || shard < 0 || shard >= shards || e.Deleted {
			continue
		}
		l, err := demand.Decode(e.Value, demand.DefaultLimits())
		if err != nil {
			d.refused[shard] = err.Error()
			d.cfg.Log.Warn("learned demand cannot be read, so its applications start empty; the next save replaces the record", "record", e.Key, "error", err)
			continue
		}
		d.learner.Merge(l)
	}
	return nil
}

// save stores the records that have changed. Records that cannot be stored are tried again with the
// next save.
func (d *Demand) save() {
	ctx, cancel := context.WithTimeout(context.Background(), saveTime)
	defer cancel()
	var errs []error
	for shard := range shards {
		record, changed := d.record(shard)
		if !changed {
			continue
		}
		if _, err := d.cfg.Store.Put(ctx, strconv.Itoa(shard), record); err != nil {
			errs = append(errs, err)
			d.learning.Lock()
			d.changed[shard] = true
			d.learning.Unlock()
		}
	}
	switch failed := len(errs) > 0; {
	case failed && !d.failed:
		d.cfg.Log.Warn("learned demand is not stored; this is tried again each minute, and what was learned is lost if the process ends before", "error", errs[0], "records", len(errs))
	case !failed && d.failed:
		d.cfg.Log.Info("learned demand is stored again")
	}
	d.failed = len(errs) > 0
}

// record returns the record of a shard, and whether it has to be stored.
func (d *Demand) record(shard int) (record []byte, changed bool) {
	d.learning.Lock()
	defer d.learning.Unlock()
	d.learn()
	if !d.changed[shard] {
		return nil, false
	}
	d.changed[shard] = false
	record, left := d.learner.Encode(func(app string) bool { return shardOf(app) == shard }, shardLimit)
	if left > 0 && !d.tight {
		d.tight = true
		d.cfg.Log.Warn("learned demand does not fit into its record; applications that were used least recently are lost at a restart", "record", shard, "applications", left)
	}
	return record, true
}
