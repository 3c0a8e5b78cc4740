package contained

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/stagecoach-serving/stagecoach/image"
)

// Collect removes images whose digest is not in used, and that were not used for idle. It also
// removes what failures have left. It returns the number of bytes that containerd has freed. Parts
// that other images or users of containerd need stay.
func (s *Store) Collect(ctx context.Context, used []string, idle time.Duration) (freed int64, err error) {
	all, err := s.digests()
	if err != nil {
		return 0, s.explain(ctx, "", err)
	}
	var errs []error
	for _, digest := range all {
		if slices.Contains(used, digest) {
			continue
		}
		release, ok := s.takeIdle(digest, idle)
		if !ok {
			continue
		}
		n, err := s.remove(ctx, digest)
		release()
		freed += n
		errs = append(errs, err)
	}
	errs = append(errs, s.dropStrays(ctx))
	return freed, s.explain(ctx, "", errors.Join(errs...))
}

// takeIdle keeps others from an image until release, if it was not used for idle.
func (s *Store) takeIdle(digest string, idle time.Duration) (release func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, taken := s.busy[digest]; taken {
		return nil, false
	}
	info, err := os.Stat(s.folder(digest))
	if err != nil || info.ModTime().After(time.Now().Add(-idle)) {
		return nil, false
	}
	delete(s.views, digest)
	return s.take(digest), true
}

// remove removes an image and returns how many bytes that has freed.
func (s *holder) remove(ctx context.Context, digest string) (freed int64, err error) {
	sizes := s.sizes(ctx, digest)
	if err := s.drop(ctx, digest); err != nil {
		return 0, err
	}
	for part, size := range sizes {
		if part.gone(ctx, s) {
			freed += size
		}
	}
	return freed, nil
}

// part is content or a snapshot in containerd.
type part struct {
	digest   digest.Digest // of content; empty: it is a snapshot
	snapshot string
}

func (p part) gone(ctx context.Context, s *holder) bool {
	var err error
	if p.digest != "" {
		_, err = s.client.ContentStore().Info(ctx, p.digest)
	} else {
		_, err = s.client.SnapshotService(s.cfg.Snapshotter).Stat(ctx, p.snapshot)
	}
	return errdefs.IsNotFound(err)
}

// sizes returns the sizes of an image's parts, in bytes. Parts that cannot be read are left out.
func (s *holder) sizes(ctx context.Context, of string) map[part]int64 {
	out := map[part]int64{}
	store := s.client.ContentStore()
	var m ocispec.Manifest
	var c ocispec.Image
	if !readJSON(ctx, store, digest.Digest(of), &m) || !readJSON(ctx, store, m.Config.Digest, &c) {
		return out
	}
	for _, d := range append(m.Layers, m.Config) {
		out[part{digest: d.Digest}] = d.Size
	}
	for i := range c.RootFS.DiffIDs {
		id := identity.ChainID(slices.Clone(c.RootFS.DiffIDs[:i+1])).String()
		if u, err := s.client.SnapshotService(s.cfg.Snapshotter).Usage(ctx, id); err == nil {
			out[part{snapshot: id}] = u.Size
		}
	}
	return out
}

func readJSON(ctx context.Context, from content.Store, d digest.Digest, into any) bool {
	info, err := from.Info(ctx, d)
	if err != nil || info.Size > image.MaxConfig {
		return false
	}
	b, err := content.ReadBlob(ctx, from, ocispec.Descriptor{Digest: d, Size: info.Size})
	return err == nil && json.Unmarshal(b, into) == nil
}
