package learn

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/stagecoach-serving/stagecoach/demand"
	"github.com/stagecoach-serving/stagecoach/request/flow"
)

// Reload reads the stored records, which another process may have written since. What this process
// has learned itself stays only for applications that the records lack.
func (d *Demand) Reload(ctx context.Context) error {
	d.saving.Lock()
	defer d.saving.Unlock()
	stored, refused, err := d.load(ctx)
	if err != nil {
		return fmt.Errorf("learned demand: %w", err)
	}
	d.learning.Lock()
	defer d.learning.Unlock()
	d.learn()
	lacks := func(app string) bool {
		_, known := stored.App(app, time.Now())
		return !known
	}
	rest, _ := d.learner.Encode(lacks, shards*shardLimit)
	own, err := demand.Decode(rest, demand.DefaultLimits())
	if err != nil {
		return fmt.Errorf("learned demand: %w", err)
	}
	stored.Merge(own)
	d.learner, d.refused, d.summary = stored, refused, flow.Summary{}
	return nil
}

// load reads the stored records, and says why some cannot be read.
func (d *Demand) load(ctx context.Context) (stored *demand.Learner, refused [shards]string, err error) {
	var found []Entry
	loaded := false
	stop, err := d.cfg.Store.Watch(ctx, func(e Entry) {
		if !loaded {
			found = append(found, e)
		}
	})
	if err != nil {
		return nil, refused, err
	}
	stop() // f does not run any more
	loaded = true
	stored = demand.New(demand.DefaultLimits())
	for _, e := range found {
		shard, err := strconv.Atoi(e.Key)
		if err != nil || shard < 0 || shard >= shards || e.Deleted {
			continue
		}
		l, err := demand.Decode(e.Value, demand.DefaultLimits())
		if err != nil {
			refused[shard] = err.Error()
			d.cfg.Log.Warn("learned demand cannot be read, so its applications start empty; the next save replaces the record", "record", e.Key, "error", err)
			continue
		}
		stored.Merge(l)
	}
	return stored, refused, nil
}

// Save stores the records that have changed. Records that cannot be stored are tried again with the
// next save.
func (d *Demand) Save() {
	d.saving.Lock()
	defer d.saving.Unlock()
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
