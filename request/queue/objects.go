package queue

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// contents holds the contents of large records, each under a name of its own.
type contents interface {
	// put stores data and returns its name.
	put(data []byte) (name string, err error)
	get(name string) ([]byte, error)
	// drop deletes a content. It does nothing for an empty name, and for one that does not exist.
	drop(name string) error
	// sweep deletes what no record names.
	sweep(named map[string]bool) error
}

// objects holds contents in the object store of a NATS cluster, which all control planes share.
type objects struct {
	store  jetstream.ObjectStore
	stream jetstream.Stream // of the store
	disk   *Disk
}

// objectBucket is the bucket of large records.
const objectBucket = "journal"

// Bounds of the use of the object store.
const (
	objectTimeout = 30 * time.Second // of a large record
	// Age from which a content that no record names is deleted. Before that, its record may still be
	// on its way to the journal.
	objectAge = 10 * time.Minute
)

func openObjects(ctx context.Context, js jetstream.JetStream, d *Disk) (objects, error) {
	copies, err := d.copies(ctx, js, "OBJ_"+objectBucket)
	if err != nil {
		return objects{}, fmt.Errorf("journal: object store: %w", err)
	}
	o := objects{disk: d}
	o.store, err = js.CreateOrUpdateObjectStore(ctx, jetstream.ObjectStoreConfig{Bucket: objectBucket, Storage: jetstream.FileStorage, Replicas: copies})
	if err == nil {
		o.stream, err = js.Stream(ctx, "OBJ_"+objectBucket)
	}
	if err != nil {
		return objects{}, fmt.Errorf("journal: object store: %w", err)
	}
	return o, nil
}

func (o objects) put(data []byte) (name string, err error) {
	name = blobPrefix + rand.Text()
	ctx, cancel := context.WithTimeout(context.Background(), objectTimeout)
	defer cancel()
	err = o.disk.writing(ctx, func(ctx context.Context) error {
		_, err := o.store.PutBytes(ctx, name, data)
		return err
	})
	if err != nil {
		return "", o.disk.late(err)
	}
	return name, nil
}

func (o objects) get(name string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), objectTimeout)
	defer cancel()
	b, err := o.store.GetBytes(ctx, name)
	if err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) {
		return nil, transient{err}
	}
	return b, err
}

// transient is an error of a read that may succeed later.
type transient struct{ error }

func (t transient) Unwrap() error { return t.error }

func (o objects) drop(name string) error {
	if name == "" {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), objectTimeout)
	defer cancel()
	if err := o.store.Delete(ctx, name); err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) {
		return err
	}
	// Delete leaves a mark for watchers. Nothing watches.
	mark := fmt.Sprintf("$O.%s.M.%s", objectBucket, base64.URLEncoding.EncodeToString([]byte(name)))
	return o.stream.Purge(ctx, jetstream.WithPurgeSubject(mark))
}

func (o objects) sweep(named map[string]bool) error {
	ctx, cancel := context.WithTimeout(context.Background(), objectTimeout)
	defer cancel()
	all, err := o.store.List(ctx)
	if errors.Is(err, jetstream.ErrNoObjectsFound) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, info := range all {
		if !named[info.Name] && time.Since(info.ModTime) > objectAge {
			errs = append(errs, o.drop(info.Name))
		}
	}
	return errors.Join(errs...)
}
