package queue

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
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

// Bounds of the use of object stores.
const (
	objectTimeout = 30 * time.Second // of one object
	// Age from which a content that no record names is deleted. Before that, its record may still be
	// on its way to the journal.
	objectAge = 10 * time.Minute
)

// Object describes an object in a store.
type Object = struct {
	Name string
	Size int64
	At   time.Time // when it was stored, by the clock of the process that stored it
}

// Objects is an object store of a NATS cluster, which all control planes share. Its methods are
// safe for concurrent use.
type Objects struct {
	bucket string
	js     jetstream.JetStream
	store  jetstream.ObjectStore
	stream jetstream.Stream // of the store
	disk   *Disk
}

// OpenObjects opens an object store. It creates the store if it does not exist. d is the disk of
// the servers that nc is connected to.
func OpenObjects(ctx context.Context, nc *nats.Conn, d *Disk, bucket string) (*Objects, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("object store %q: %w", bucket, err)
	}
	return openObjects(ctx, js, d, bucket)
}

func openObjects(ctx context.Context, js jetstream.JetStream, d *Disk, bucket string) (*Objects, error) {
	copies, err := d.copies(ctx, js, "OBJ_"+bucket)
	if err != nil {
		return nil, fmt.Errorf("object store %q: %w", bucket, err)
	}
	o := &Objects{bucket: bucket, js: js, disk: d}
	o.store, err = js.CreateOrUpdateObjectStore(ctx, jetstream.ObjectStoreConfig{Bucket: bucket, Storage: jetstream.FileStorage, Replicas: copies})
	if err == nil {
		o.stream, err = js.Stream(ctx, "OBJ_"+bucket)
	}
	if err != nil {
		return nil, fmt.Errorf("object store %q: %w", bucket, err)
	}
	return o, nil
}

// Get returns an object, or [ErrNotFound]. A copy that lags behind may not have the object yet.
func (o *Objects) Get(ctx context.Context, name string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	b, err := o.store.GetBytes(ctx, name)
	if err != nil {
		return nil, fmt.Errorf("get object %q: %w", name, notFound(err))
	}
	return b, nil
}

// Stat describes an object, or returns [ErrNotFound].
func (o *Objects) Stat(ctx context.Context, name string) (Object, error) {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	info, err := o.store.GetInfo(ctx, name)
	if err != nil {
		return Object{}, fmt.Errorf("object %q: %w", name, notFound(err))
	}
	return describe(info), nil
}

func describe(info *jetstream.ObjectInfo) Object {
	return Object{Name: info.Name, Size: int64(info.Size), At: info.ModTime}
}

func notFound(err error) error {
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		return fmt.Errorf("%w: %w", ErrNotFound, err)
	}
	return err
}

// List describes all objects.
func (o *Objects) List(ctx context.Context) ([]Object, error) {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	all, err := o.store.List(ctx)
	if err != nil && !errors.Is(err, jetstream.ErrNoObjectsFound) {
		return nil, fmt.Errorf("list objects of %q: %w", o.bucket, err)
	}
	out := make([]Object, len(all))
	for i, info := range all {
		out[i] = describe(info)
	}
	return out, nil
}

// Delete deletes an object. It is no error if the object does not exist.
func (o *Objects) Delete(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	if err := o.store.Delete(ctx, name); err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) {
		return fmt.Errorf("delete object %q: %w", name, err)
	}
	// Delete leaves a mark for watchers. Nothing watches.
	return o.stream.Purge(ctx, jetstream.WithPurgeSubject(o.metaSubject(name)))
}

// objectBucket is the store of large records.
const objectBucket = "journal"

// objects holds contents in an object store.
type objects struct{ *Objects }

func (o objects) put(data []byte) (name string, err error) {
	name = blobPrefix + rand.Text()
	if err := o.Put(context.Background(), name, data); err != nil {
		return "", o.disk.late(err)
	}
	return name, nil
}

func (o objects) get(name string) ([]byte, error) {
	b, err := o.Get(context.Background(), name)
	if err != nil && !errors.Is(err, ErrNotFound) {
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
	return o.Delete(context.Background(), name)
}

func (o objects) sweep(named map[string]bool) error {
	all, err := o.List(context.Background())
	if err != nil {
		return err
	}
	var errs []error
	for _, is := range all {
		if !named[is.Name] && time.Since(is.At) > objectAge {
			errs = append(errs, o.drop(is.Name))
		}
	}
	return errors.Join(errs...)
}
