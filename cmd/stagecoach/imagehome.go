package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/image/depot"
	"github.com/stagecoach-serving/stagecoach/image/transfer"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// imageHome is where control planes that share a NATS cluster keep images: those that were built,
// loaded or packed from folders. Images of registries stay there. It is safe for concurrent use.
type imageHome struct {
	depot     *depot.Depot
	fetcher   *transfer.Fetcher
	store     *image.Store // of this process
	registry  image.Registry
	functions func() []*provider.Deployed
	log       *slog.Logger

	mu    sync.Mutex
	fault map[string]string // why images are missing, by digest, as it was logged
}

// imageBucket is the object store of images.
const imageBucket = "images"

// depotBucket adapts the errors of an object store.
type depotBucket struct{ *queue.Objects }

// Get implements depot.Objects.
func (b depotBucket) Get(ctx context.Context, name string) ([]byte, error) {
	out, err := b.Objects.Get(ctx, name)
	return out, noObject(err)
}

// Stat implements depot.Objects.
func (b depotBucket) Stat(ctx context.Context, name string) (depot.Object, error) {
	out, err := b.Objects.Stat(ctx, name)
	return out, noObject(err)
}

func noObject(err error) error {
	if errors.Is(err, queue.ErrNotFound) {
		return fmt.Errorf("%w: %w", depot.ErrNone, err)
	}
	return err
}

// openImageHome opens the images of all control planes. It returns nil if NATS is inside.
func openImageHome(ctx context.Context, u *up, store *image.Store) (*imageHome, error) {
	if !u.leading.outside() {
		return nil, nil
	}
	nc, err := u.nats.Connect("images")
	if err != nil {
		return nil, err
	}
	u.onClose(func() error { nc.Close(); return nil })
	objects, err := queue.OpenObjects(ctx, nc, u.nats.Disk(), imageBucket)
	if err != nil {
		return nil, err
	}
	h := &imageHome{
		depot: depot.New(depotBucket{objects}), fetcher: transfer.NewFetcher(transfer.FetcherConfig{Store: store, Log: u.log}),
		store: store, registry: u.cfg.registry(), functions: u.registry.Functions, log: u.log, fault: map[string]string{},
	}
	u.onClose(func() error { h.fetcher.Close(); return nil })
	return h, nil
}

// resolve returns the digest of the image that a name means: in the store of this process, or in
// that of all control planes, whichever was told later. Then the image is in the store of this
// process. The error wraps image.ErrNoImage if both do not know the name.
func (h *imageHome) resolve(ctx context.Context, ref image.Ref) (digest string, err error) {
	if ref.Digest != "" {
		return ref.Digest, h.fetch(ctx, ref.Digest)
	}
	digest, err = h.store.Resolve(ref.Name)
	if err != nil && !errors.Is(err, image.ErrNoImage) {
		return "", err
	}
	shared, added, bad := h.depot.Resolve(ctx, ref.Name)
	switch {
	case bad != nil && !errors.Is(bad, image.ErrNoImage):
		return "", bad
	case bad != nil, err == nil && !added.After(image.Added(h.store, digest)):
		return digest, err
	}
	return shared, h.fetch(ctx, shared)
}

// fetch gets an image from the store of all control planes, unless this process has it.
func (h *imageHome) fetch(ctx context.Context, digest string) error {
	return h.fetcher.Fetch(ctx, digest, []transfer.Source{h.depot.Source()})
}

// keep returns when all control planes can get an image that this process has, and know its name.
func (h *imageHome) keep(ctx context.Context, ref image.Ref, digest string) error {
	begun := time.Now()
	if err := h.depot.Put(ctx, h.store, digest); err != nil {
		return err
	}
	h.log.Info("image is where all control planes find it", "image", ref.Name, "digest", digest, "took", time.Since(begun).Round(time.Millisecond))
	if ref.Digest != "" {
		return nil
	}
	if known, _, err := h.depot.Resolve(ctx, ref.Name); err == nil && known == digest {
		return nil
	}
	return h.depot.Name(ctx, ref.Name, digest, image.Added(h.store, digest))
}

// ensure returns when this process has the image that a function runs. If ctx ends first, the fetch
// goes on.
func (h *imageHome) ensure(ctx context.Context, ref image.Ref) error {
	sources := []transfer.Source{h.depot.Source()}
	if ref.Host != "" || h.registry.Default != "" {
		sources = append(sources, transfer.Registry(h.registry, ref.String()))
	}
	return h.fetcher.Fetch(ctx, ref.Digest, sources)
}

// ensureDigest is ensure for an image that a node asks for.
func (h *imageHome) ensureDigest(ctx context.Context, digest string) error {
	for _, f := range h.functions() {
		if f.Digest == digest {
			ref, err := image.ParseRef(pinned(f))
			if err != nil {
				return err
			}
			return h.ensure(ctx, ref)
		}
	}
	return h.fetch(ctx, digest)
}

// fetchDigest returns the function that fetches an image that a node asks for; nil: images are not
// fetched.
func (i *images) fetchDigest() func(ctx context.Context, digest string) error {
	if i.home == nil {
		return nil
	}
	return i.home.ensureDigest
}

// here returns images without their fetches, for callers that cannot wait.
func (i *images) here() *images {
	return &images{folders: i.folders, store: i.store, contained: i.contained, registry: i.registry, accounts: i.accounts, share: i.share}
}

// gather gets the image of a function before it is needed, and reports whether it has come now.
func (i *images) gather(ctx context.Context, f *provider.Deployed, unpack bool) bool {
	ref, err := image.ParseRef(pinned(f))
	if err != nil || ref.Digest == "" || image.Has(i.store, ref.Digest) || i.contained != nil && i.contained.Has(ref.Digest) {
		return false
	}
	if i.contained != nil {
		err = i.home.fetch(ctx, ref.Digest)
		if errors.Is(err, image.ErrNoImage) {
			return false // containerd pulls it from its registry when it is needed
		}
	} else {
		err = i.home.ensure(ctx, ref)
	}
	if err == nil && unpack {
		_, err = i.root(ctx, ref, ref.Digest)
	}
	if ctx.Err() == nil {
		i.home.said(f.Key, ref.Digest, err)
	}
	return err == nil
}

// said logs why an image is missing, once.
func (h *imageHome) said(key pipeline.Key, digest string, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if err == nil {
		delete(h.fault, digest)
		return
	}
	if text := err.Error(); h.fault[digest] != text {
		h.fault[digest] = text
		h.log.Warn("this control plane lacks the image of a function, and tries again", "function", key, "error", err)
	}
}

// gatherEvery is the time between two looks for images that this process lacks.
const gatherEvery = 2 * time.Second

// gatherImages gets the images of all functions, so that this process can lead at once, until ctx
// ends.
func gatherImages(ctx context.Context, u *up) error {
	tick := time.NewTicker(gatherEvery)
	defer tick.Stop()
	for {
		for _, f := range u.registry.Functions() {
			if !u.images.gather(ctx, f, u.nodes.keys != nil) {
				continue
			}
			u.leading.changes.Lock()
			if now, there := u.registry.Function(f.Key); there && now.Revision == f.Revision {
				u.kinds.changed(f.Key, f)
				if u.leading.leads() {
					if err := u.lines.Ensure(lineOf(f, u.kinds.of(f.Key))); err != nil {
						u.log.Error("function has no line", "function", f.Key, "error", err)
					}
				}
			}
			u.leading.changes.Unlock()
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// collectHome deletes the images that no function needs from the store of all control planes, if
// this process leads and may act.
func collectHome(ctx context.Context, u *up, used []string) {
	h := u.images.home
	if h == nil || !u.leading.acts() {
		return
	}
	freed, err := h.depot.Collect(ctx, used, collectAfter)
	if err != nil && ctx.Err() == nil {
		u.log.Warn("unused images are not removed from NATS", "error", err)
	}
	if freed > 0 {
		u.log.Info("removed unused images from NATS", "bytes", freed)
	}
}
