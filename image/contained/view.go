package contained

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/rootfs"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/image"
)

// unpack makes a snapshot per layer, each on top of the one before. Snapshots that exist are used.
func (s *holder) unpack(ctx context.Context, p parts) error {
	snapshotter := s.client.SnapshotService(s.cfg.Snapshotter)
	var chain []digest.Digest
	for i, blob := range p.manifest.Layers {
		want := p.config.RootFS.DiffIDs[i]
		layer := rootfs.Layer{Diff: ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Digest: want}, Blob: blob}
		made, err := rootfs.ApplyLayerWithOpts(ctx, layer, chain, snapshotter, s.client.DiffService(), nil, nil)
		chain = append(chain, want)
		if err == nil && !made {
			err = s.hold(ctx, identity.ChainID(chain).String())
		}
		if err != nil {
			return &unpackError{fmt.Errorf("layer %d of %d, want files with digest %s: %w", i+1, len(p.manifest.Layers), want, err)}
		}
	}
	return nil
}

// hold adds a snapshot to the lease in ctx.
func (s *holder) hold(ctx context.Context, snapshot string) error {
	id, _ := leases.FromContext(ctx)
	return s.client.LeasesService().AddResource(ctx, leases.Lease{ID: id}, leases.Resource{ID: snapshot, Type: "snapshots/" + s.cfg.Snapshotter})
}

// show mounts a view of an unpacked image, and records that the image is ready.
func (s *holder) show(ctx context.Context, name, digest string, p parts) (image.Root, error) {
	parent := identity.ChainID(p.config.RootFS.DiffIDs).String()
	snapshotter := s.client.SnapshotService(s.cfg.Snapshotter)
	mounts, err := snapshotter.View(ctx, s.key(digest), parent, snapshots.WithLabels(s.labels(digest)))
	if errdefs.IsAlreadyExists(err) {
		if err = s.hold(ctx, s.key(digest)); err == nil {
			mounts, err = snapshotter.Mounts(ctx, s.key(digest))
		}
	}
	if err != nil {
		return image.Root{}, &unpackError{fmt.Errorf("view: %w", err)}
	}
	if err := s.mount(digest, mounts); err != nil {
		return image.Root{}, err
	}
	r := image.Root{Digest: digest, Dir: s.fs(digest), Config: p.runs, Stage: p.runs.Labels[image.ProtocolLabel] == image.ProtocolVersion}
	if err := s.writeRecord(digest, record{recordVersion, name, s.cfg.Snapshotter, parent, r}); err != nil {
		return image.Root{}, err
	}
	now := time.Now()
	return r, os.Chtimes(s.folder(digest), now, now)
}

// remount mounts the view of an image that was ready, unless it is mounted.
func (s *holder) remount(ctx context.Context, digest string) error {
	if mounted(s.fs(digest)) {
		return nil
	}
	mounts, err := s.client.SnapshotService(s.cfg.Snapshotter).Mounts(ctx, s.key(digest))
	if err != nil {
		return err
	}
	return s.mount(digest, mounts)
}

// mount mounts a view. Nothing in it has the rights of its owner, and devices in it do not work.
func (s *holder) mount(digest string, mounts []mount.Mount) error {
	at := s.fs(digest)
	if err := os.MkdirAll(at, 0o700); err != nil {
		return err
	}
	if err := unmount(at); err != nil {
		return err
	}
	for i := range mounts {
		mounts[i].Options = append(mounts[i].Options, "nosuid", "nodev")
	}
	if err := mount.All(mounts, at); err != nil {
		return fmt.Errorf("mount %s: %w", at, err)
	}
	return nil
}

// mounted reports whether something is mounted at a folder.
func mounted(at string) bool {
	var st unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, at, unix.AT_SYMLINK_NOFOLLOW, 0, &st)
	return err == nil && st.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0
}

// unmount unmounts all that is mounted at a folder. Processes that still use it keep it.
func unmount(at string) error {
	for {
		err := unix.Unmount(at, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		switch {
		case errors.Is(err, unix.EINVAL), errors.Is(err, fs.ErrNotExist): // nothing is mounted
			return nil
		case err != nil:
			return fmt.Errorf("unmount %s: %w", at, err)
		}
	}
}
