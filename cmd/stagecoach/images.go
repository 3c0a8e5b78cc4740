package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/image/contained"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// images finds an image in one of three places, in this order: a folder of folders, for
// development; a store; the registry that the image's name contains.
type images struct {
	folders   sandbox.Images
	store     *image.Store
	contained *contained.Store // of a node with runtime containerd; nil: images run from store
	registry  image.Registry
	accounts  bool          // replicas on this machine run as users of their own
	packed    packedFolders // of a daemon: folders of the control plane
	share     *imageShare   // with nodes; nil: no nodes can join
	home      *imageHome    // with other control planes; nil: NATS is inside
}

// pull asks the registry which image a name stands for, fetches that image and returns its digest.
func (i *images) pull(ctx context.Context, name string) (digest string, err error) {
	if i.contained != nil {
		return i.contained.Pull(ctx, name)
	}
	return i.registry.Pull(ctx, i.store, name)
}

// root returns the folder from which the image with a digest runs.
func (i *images) root(ctx context.Context, ref image.Ref, digest string) (image.Root, error) {
	if i.contained != nil {
		ref.Digest = digest
		return i.contained.Root(ctx, ref.String())
	}
	return i.store.Root(ctx, digest)
}

// collect removes the images that no function uses and that were not touched for idle, and returns
// the number of bytes that it has freed.
func (i *images) collect(ctx context.Context, used []string, idle time.Duration) (freed int64, err error) {
	freed, err = i.store.Collect(ctx, used, idle)
	if i.contained != nil {
		n, bad := i.contained.Collect(ctx, used, idle)
		freed, err = freed+n, errors.Join(err, bad)
	}
	return freed, err
}

// registry configures access to registries.
func (c *Config) registry() image.Registry {
	r := c.Registry
	return image.Registry{Auth: r.Auth, Insecure: r.Insecure, Default: r.Default, Timeout: r.Timeout}
}

// openImages opens the places where images are found.
func (u *up) openImages(ctx context.Context) error {
	dir := u.cfg.imagesDir()
	store, err := image.OpenStore(image.Folder(dir))
	if err != nil {
		return err
	}
	u.onClose(func() error { store.Close(); return nil })
	home, err := openImageHome(ctx, u, store)
	if err != nil {
		return err
	}
	u.images = &images{home: home, folders: sandbox.Images{Dir: dir}, store: store, registry: u.cfg.registry(), accounts: u.accounts.open != nil && !u.cfg.Node.None}
	if err := shareImages(u); err != nil {
		return err
	}
	if u.cfg.Node.None {
		return nil // images are pinned for nodes that join, and fetched, imported or pulled there
	}
	c := contained.Config{Node: u.cfg.Node.Name, Built: store, Registry: u.cfg.registry(), Log: u.log}
	if u.images.contained, err = u.cfg.Runtime.openImages(ctx, u.cfg.State, c); err == nil && u.images.contained != nil {
		u.onClose(u.images.contained.Close)
	}
	return err
}

// Pin implements provider.Images. The content of a folder can change, so a folder is not pinned,
// unless other control planes need it.
func (i *images) Pin(ctx context.Context, name string) (string, error) {
	noFolder := i.folders.Check(image.Familiar(name))
	if noFolder == nil && i.home == nil {
		return "", nil
	}
	ref, err := image.ParseRef(name)
	if err != nil {
		return "", err
	}
	var digest string
	built := true // not from a registry, which would keep it
	switch {
	case noFolder == nil:
		digest, err = i.share.packs.digest(ctx, image.Familiar(name))
	case i.home != nil:
		digest, err = i.home.resolve(ctx, ref)
	default:
		digest, err = i.store.Resolve(name)
	}
	if errors.Is(err, image.ErrNoImage) {
		if ref.Host == "" && i.registry.Default == "" {
			return "", fmt.Errorf("%w; or bring it into the store (stagecoach image load FILE, stagecoach image pull NAME); or name its registry, REGISTRY/%s", noFolder, name)
		}
		digest, err = i.pull(ctx, name)
		built = false
	}
	if err == nil {
		// Unpacks the image ahead of its starts, so that the deploy reports it if that fails.
		_, err = i.root(ctx, ref, digest)
	}
	if err == nil && built && i.home != nil {
		err = i.home.keep(ctx, ref, digest)
	}
	if err != nil && !errors.Is(err, image.ErrNoImage) {
		err = fmt.Errorf("%w: %w", provider.ErrImages, err)
	}
	return digest, err
}

// Guess implements provider.Images.
func (i *images) Guess(name, digest string) (provider.Guess, error) {
	name = image.Familiar(name)
	if digest == "" {
		g, err := i.folders.Guess(name)
		return provider.Guess(g), err
	}
	resolved, err := i.Resolve(withDigest(name, digest))
	if err != nil || resolved.Rootfs || resolved.Stage {
		return provider.Guess{}, nil //nolint:nilerr // what is wrong with the image itself, Pin has said
	}
	g, err := sandbox.GuessIn(resolved.Root, name)
	return provider.Guess(g), err
}

// Stage implements provider.Images.
func (i *images) Stage(name, digest string) bool {
	resolved, err := i.Resolve(withDigest(name, digest))
	return err == nil && resolved.Stage
}

// Model implements provider.Images. A folder without its model passes, because files can still be
// added to it. The start then reports what is missing.
func (i *images) Model(name, digest string, env map[string]string) error {
	resolved, err := i.Resolve(withDigest(name, digest))
	if err != nil || !resolved.Stage {
		return nil //nolint:nilerr // what is wrong with the image itself, Pin has said
	}
	model, set := env[wire.EnvModel]
	for _, kv := range resolved.Env {
		if own, ok := strings.CutPrefix(kv, wire.EnvModel+"="); ok && !set {
			model = own
		}
	}
	err = keysmanager.CheckModel(resolved.Root, model)
	if digest == "" && errors.Is(err, keysmanager.ErrModelMissing) {
		return nil
	}
	return err
}

// Program implements provider.Images. It looks at the files of this machine. If replicas run only
// on other nodes, it accepts every program.
func (i *images) Program(name, digest, process string, env map[string]string) error {
	if !i.accounts {
		return nil
	}
	resolved, err := i.Resolve(withDigest(name, digest))
	if err != nil || resolved.Rootfs {
		return nil //nolint:nilerr // a start says what is wrong with the image
	}
	return sandbox.Command{Dir: resolved.Root, Process: process, Env: env, As: &sandbox.Others}.Visible()
}

// unpackTimeout bounds a start whose image has to be unpacked again.
const unpackTimeout = time.Minute

// Resolve implements keysmanager.Images, for names as pinned makes them.
func (i *images) Resolve(name string) (sandbox.Image, error) {
	pinned := name
	if !strings.Contains(name, "@") {
		digest := i.packed.get(name)
		if digest == "" || i.folders.Check(name) == nil {
			return i.folders.Resolve(name)
		}
		pinned = "folder@" + digest // a folder's name may not be valid for a registry
	}
	ref, err := image.ParseRef(pinned)
	if err != nil {
		return sandbox.Image{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), unpackTimeout)
	defer cancel()
	if i.home != nil && (i.contained == nil || !i.contained.Has(ref.Digest)) {
		if err := i.home.ensure(ctx, ref); err != nil && i.contained == nil {
			return sandbox.Image{}, err
		}
	}
	root, err := i.root(ctx, ref, ref.Digest)
	if errors.Is(err, image.ErrNoImage) {
		err = fmt.Errorf("%w; deploy the function again", err)
	}
	if err != nil {
		return sandbox.Image{}, err
	}
	return sandbox.Image{
		Name: name, Root: root.Dir, Digest: strings.TrimPrefix(root.Digest, "sha256:"), Stage: root.Stage,
		Rootfs:     !root.Stage && root.Config.Labels[image.FolderLabel] == "",
		Entrypoint: root.Config.Entrypoint, Env: root.Config.Env, WorkDir: root.Config.WorkDir, User: root.Config.User,
	}, nil
}

// pinned returns the name of a function's image with the digest that its latest deploy resolved.
func pinned(f *provider.Deployed) string { return withDigest(f.Deployment.Image, f.Digest) }

// withDigest returns the name of an image with its digest. All spellings of an image give the same
// name. digest is empty for a folder.
func withDigest(name, digest string) string {
	ref, err := image.ParseRef(name)
	if digest == "" || err != nil { // a folder's name may not be valid for a registry
		return image.Familiar(name)
	}
	return ref.Name + "@" + digest
}

// Every collectEvery, unused images are removed if they were not touched for collectAfter.
const (
	collectEvery = time.Hour
	collectAfter = time.Hour
)

// collectImages removes unused images, so that the store does not grow with each deploy.
func (u *up) collectImages(ctx context.Context) error {
	tick := time.NewTicker(collectEvery)
	defer tick.Stop()
	for {
		used := imagesInUse(u)
		if err := image.NoteUsed(ctx, u.images.store, nodeID("up", u.cfg.State), used); err != nil && ctx.Err() == nil {
			u.log.Warn("nodes cannot know which images are used", "error", err)
		}
		collectHome(ctx, u, used)
		freed, err := u.images.collect(ctx, used, collectAfter)
		if err != nil && ctx.Err() == nil {
			u.log.Warn("unused images are not removed", "error", err)
		}
		if freed > 0 {
			u.log.Info("removed unused images", "bytes", freed)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

// notesAge is the age from which a note of used images does not count: its `up` has ended for good.
const notesAge = 7 * 24 * time.Hour
