package contained

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"

	"github.com/stagecoach-serving/stagecoach/image"
)

// Labels of leases and snapshots. LabelFolder has the folder of the node's views, and only images
// have it.
const (
	LabelFolder = "stagecoach.dev/images"
	labelNode   = "stagecoach.dev/node"
	labelDigest = "stagecoach.dev/image-digest"
)

// holder holds images in containerd, and mounts their views in a folder.
type holder struct {
	*fetcher

	id string // of the folder, in names of leases and snapshots
}

func (s *holder) folder(digest string) string {
	return filepath.Join(s.cfg.Dir, strings.TrimPrefix(digest, "sha256:"))
}

func (s *holder) fs(digest string) string { return filepath.Join(s.folder(digest), "fs") }

func (s *holder) labels(digest string) map[string]string {
	return map[string]string{labelNode: s.cfg.Node, labelDigest: digest, LabelFolder: s.cfg.Dir}
}

// key returns the name of an image's lease and of its view.
func (s *holder) key(digest string) string {
	return s.id + "-" + strings.TrimPrefix(digest, "sha256:")
}

// lease creates the lease of an image, and returns a context whose calls add what they make to it.
func (s *holder) lease(ctx context.Context, digest string) (context.Context, error) {
	_, err := s.client.LeasesService().Create(ctx, leases.WithID(s.key(digest)), leases.WithLabels(s.labels(digest)))
	if err != nil && !errdefs.IsAlreadyExists(err) {
		return nil, fmt.Errorf("lease: %w", err)
	}
	return leases.WithLease(ctx, s.key(digest)), nil
}

// record says how an image that is ready runs, and where its view is.
type record struct {
	Version     int
	Name        string // that it was asked for by
	Snapshotter string
	Parent      string // snapshot that is the image's last layer
	Root        image.Root
}

const recordVersion = 1

func (s *holder) recordFile(digest string) string {
	return filepath.Join(s.folder(digest), "image.json")
}

func (s *holder) readRecord(digest string) (r record, err error) {
	b, err := os.ReadFile(s.recordFile(digest))
	if err != nil {
		return r, err
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return r, err
	}
	if r.Version != recordVersion {
		return r, fmt.Errorf("version %d, want %d", r.Version, recordVersion)
	}
	return r, nil
}

func (s *holder) writeRecord(digest string, r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	tmp := s.recordFile(digest) + ".tmp"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, s.recordFile(digest))
}

var folderForm = regexp.MustCompile(`^[0-9a-f]{64}$`)

// digests returns the digests of the images that have a folder.
func (s *holder) digests() ([]string, error) {
	entries, err := os.ReadDir(s.cfg.Dir)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range entries {
		if folderForm.MatchString(e.Name()) {
			out = append(out, "sha256:"+e.Name())
		}
	}
	return out, nil
}

// restore mounts the views of an earlier process, and removes what it has not completed.
func (s *Store) restore(ctx context.Context) error {
	all, err := s.digests()
	if err != nil {
		return err
	}
	var errs []error
	for _, digest := range all {
		r, err := s.readRecord(digest)
		if err == nil && r.Snapshotter == s.cfg.Snapshotter && r.Root.Dir == s.fs(digest) {
			if err = s.remount(ctx, digest); err == nil {
				s.mu.Lock()
				s.views[digest] = r.Root
				s.mu.Unlock()
				continue
			}
			if !errdefs.IsNotFound(err) {
				errs = append(errs, fmt.Errorf("view of %s: %w", digest, err))
				continue
			}
		}
		errs = append(errs, s.drop(ctx, digest)) // a start makes it again
	}
	errs = append(errs, s.dropStrays(ctx))
	return errors.Join(errs...)
}

// dropStrays deletes leases of this folder whose images are neither ready nor being made ready.
func (s *Store) dropStrays(ctx context.Context) error {
	all, err := s.client.LeasesService().List(ctx, fmt.Sprintf("labels.%q==%q", LabelFolder, s.cfg.Dir))
	if err != nil {
		return fmt.Errorf("leases: %w", err)
	}
	var errs []error
	for _, l := range all {
		digest := l.Labels[labelDigest]
		release, ok := s.tryTake(digest)
		if !ok {
			continue
		}
		if _, err := os.Stat(s.recordFile(digest)); errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, s.drop(ctx, digest))
		}
		release()
	}
	return errors.Join(errs...)
}

// tryTake does what claim does, unless somebody else makes ready or removes the image now.
func (s *Store) tryTake(digest string) (release func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, taken := s.busy[digest]; taken {
		return nil, false
	}
	return s.take(digest), true
}

// drop removes all of an image: its mount, its folder, its view, and the lease on its content. It
// continues after ctx has ended, for a bounded time.
func (s *holder) drop(ctx context.Context, digest string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	snapshotter := s.cfg.Snapshotter
	if r, err := s.readRecord(digest); err == nil {
		snapshotter = r.Snapshotter
	}
	if err := unmount(s.fs(digest)); err != nil {
		return err
	}
	// The record goes first: without it, the next collection finds the lease.
	for _, file := range []string{s.recordFile(digest), s.recordFile(digest) + ".tmp", s.fs(digest), s.folder(digest)} {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	err := s.client.SnapshotService(snapshotter).Remove(ctx, s.key(digest))
	// After a change of the flags, containerd may lack the snapshotter. The lease can still go.
	if err != nil && !errdefs.IsNotFound(err) && !errdefs.IsInvalidArgument(err) {
		return fmt.Errorf("view: %w", err)
	}
	err = s.client.LeasesService().Delete(ctx, leases.Lease{ID: s.key(digest)}, leases.SynchronousDelete)
	if err != nil && !errdefs.IsNotFound(err) {
		return fmt.Errorf("lease: %w", err)
	}
	return nil
}
