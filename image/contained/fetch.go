package contained

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	containerd "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/stagecoach-serving/stagecoach/image"
)

// maxManifest bounds a manifest and an index, in bytes. Registries allow 4 MiB.
const maxManifest = 4 << 20

// attempts is the number of attempts to fetch a part if the transfer breaks off. What has arrived
// is kept between them.
const attempts = 3

// fetcher adds images to containerd, and explains its errors.
type fetcher struct {
	cfg    Config
	client *containerd.Client
}

// source is where the parts of an image come from.
type source struct {
	manifest ocispec.Descriptor // of one platform, never an index
	parts    remotes.Fetcher
	close    func()
}

// parts is what an image consists of.
type parts struct {
	manifest ocispec.Manifest
	config   ocispec.Image
	runs     image.Config       // how the configuration says that the image is run
	digest   ocispec.Descriptor // of the manifest
}

// find returns where the image with a digest is: in the store that a build has filled, or else in
// the registry in its name.
func (s *fetcher) find(ctx context.Context, name, digest string) (*source, error) {
	if s.cfg.Built != nil {
		e, err := image.OpenExport(ctx, s.cfg.Built, digest)
		if err == nil {
			d, err := described(e.MediaType, digest, e.Size)
			if err != nil {
				e.Close()
				return nil, err
			}
			return &source{d, stored{e}, e.Close}, nil
		}
		if !errors.Is(err, image.ErrNoImage) {
			return nil, err
		}
	}
	ask, cancel := context.WithTimeout(ctx, s.cfg.Registry.Limit(0))
	defer cancel()
	return s.ask(ask, name)
}

func described(mediaType, of string, size int64) (ocispec.Descriptor, error) {
	d, err := digest.Parse(of)
	return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: size}, err
}

// stored reads the parts of an image that was built here.
type stored struct{ *image.Export }

// Fetch implements remotes.Fetcher.
func (f stored) Fetch(_ context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
	return f.Open(d.Digest.String())
}

// hosted reads the parts of an image from a registry.
type hosted struct {
	remotes.Fetcher

	host string
}

// Fetch implements remotes.Fetcher.
func (r hosted) Fetch(ctx context.Context, d ocispec.Descriptor) (io.ReadCloser, error) {
	b, err := r.Fetcher.Fetch(ctx, d)
	if err != nil {
		return nil, &askError{err, r.host}
	}
	return b, nil
}

// ask asks the registry for an image's manifest. Of an index, it chooses the manifest for this
// platform.
func (s *fetcher) ask(ctx context.Context, name string) (*source, error) {
	host, repository, object, err := s.cfg.Registry.Locate(name)
	if err != nil {
		return nil, err
	}
	ref := host + "/" + repository
	if _, pinned := digest.Parse(object); pinned == nil {
		ref += "@" + object
	} else {
		ref += ":" + object
	}
	resolver := docker.NewResolver(docker.ResolverOptions{Hosts: s.hosts(repository)})
	ref, d, err := resolver.Resolve(ctx, ref)
	if err != nil {
		return nil, &askError{err, host}
	}
	fetcher, err := resolver.Fetcher(ctx, ref)
	if err != nil {
		return nil, &askError{err, host}
	}
	if images.IsIndexType(d.MediaType) {
		if d, err = choose(ctx, fetcher, d); err != nil {
			return nil, &askError{err, host}
		}
	}
	return &source{ocispec.Descriptor{MediaType: d.MediaType, Digest: d.Digest, Size: d.Size}, hosted{fetcher, host}, func() {}}, nil
}

// hosts returns the hosts that stand for a registry, as the operator has configured them.
func (s *fetcher) hosts(repository string) docker.RegistryHosts {
	options := config.HostOptions{
		HostDir: config.HostDirFromRoot(s.cfg.HostsDir),
		Credentials: func(host string) (string, string, error) {
			return s.cfg.Registry.Login(host, repository)
		},
	}
	return func(host string) ([]docker.RegistryHost, error) {
		options := options
		if slices.Contains(s.cfg.Registry.Insecure, host) {
			// TLS is tried first. The port says nothing about it.
			options.DefaultScheme, options.DefaultTLS = "http", &tls.Config{MinVersion: tls.VersionTLS12}
		}
		return config.ConfigureHosts(context.Background(), options)(host)
	}
}

// choose returns the manifest of an index that is for this platform.
func choose(ctx context.Context, from remotes.Fetcher, d ocispec.Descriptor) (ocispec.Descriptor, error) {
	if d.Size > maxManifest {
		return d, fmt.Errorf("%w: an index of %d bytes, want at most %d", image.ErrNoImage, d.Size, maxManifest)
	}
	r, err := from.Fetch(ctx, d)
	if err != nil {
		return d, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, maxManifest))
	if err != nil {
		return d, err
	}
	if got := digest.FromBytes(b); got != d.Digest {
		return d, &corruptError{fmt.Errorf("an index with digest %s, want %s", got, d.Digest)}
	}
	var index ocispec.Index
	if err := json.Unmarshal(b, &index); err != nil {
		return d, fmt.Errorf("%w: its index: %w", image.ErrNoImage, err)
	}
	var has []string
	for _, m := range index.Manifests {
		if m.Platform == nil || !images.IsManifestType(m.MediaType) {
			continue
		}
		got := m.Platform.OS + "/" + m.Platform.Architecture
		if got == image.Platform {
			return m, nil
		}
		has = append(has, got)
	}
	return d, fmt.Errorf("%w for this machine in its index: it is for %q, want %s", image.ErrNoImage, has, image.Platform)
}

// fetch adds all parts of an image to containerd. It checks what the manifest and configuration
// say before it fetches layers.
func (s *fetcher) fetch(ctx context.Context, from *source) (parts, error) {
	p := parts{digest: from.manifest}
	if !images.IsManifestType(p.digest.MediaType) {
		return p, fmt.Errorf("%w: it is a %s", image.ErrNoImage, p.digest.MediaType)
	}
	if p.digest.Size > maxManifest {
		return p, fmt.Errorf("%w: a manifest of %d bytes, want at most %d", image.ErrNoImage, p.digest.Size, maxManifest)
	}
	first, cancel := context.WithTimeout(ctx, s.cfg.Registry.Limit(0))
	defer cancel()
	if _, err := s.read(first, from.parts, p.digest, &p.manifest); err != nil {
		return p, fmt.Errorf("manifest: %w", err)
	}
	all, err := check(p.manifest)
	if err != nil {
		return p, err
	}
	file, err := s.read(first, from.parts, p.manifest.Config, &p.config)
	if err != nil {
		return p, fmt.Errorf("configuration: %w", err)
	}
	if p.runs, err = image.ParseConfig(file); err != nil {
		return p, err
	}
	if got := p.config.OS + "/" + p.config.Architecture; got != image.Platform {
		return p, fmt.Errorf("%w for this machine: it is for %s, want %s", image.ErrNoImage, got, image.Platform)
	}
	if got, want := len(p.manifest.Layers), len(p.config.RootFS.DiffIDs); got != want {
		return p, &corruptError{fmt.Errorf("%d layers, its configuration names %d", got, want)}
	}
	rest, cancel := context.WithTimeout(ctx, s.cfg.Registry.Limit(all))
	defer cancel()
	for i, l := range p.manifest.Layers {
		if err := s.ingest(rest, from.parts, l); err != nil {
			return p, fmt.Errorf("layer %d of %d: %w", i+1, len(p.manifest.Layers), err)
		}
	}
	return p, nil
}

// check returns the size of a manifest's layers, in bytes, or why the image is refused.
func check(m ocispec.Manifest) (all int64, err error) {
	if len(m.Layers) > image.MaxLayers || m.Config.Size > image.MaxConfig {
		return 0, fmt.Errorf("%w: %d layers and a configuration of %d bytes, want at most %d and %d", image.ErrNoImage, len(m.Layers), m.Config.Size, image.MaxLayers, image.MaxConfig)
	}
	for _, l := range m.Layers {
		if !images.IsLayerType(l.MediaType) {
			return 0, fmt.Errorf("%w: it has a %s, want only layers", image.ErrNoImage, l.MediaType)
		}
		if l.Size < 0 || l.Size > image.MaxBytes-all {
			return 0, fmt.Errorf("%w: layers of more than %d bytes", image.ErrNoImage, int64(image.MaxBytes))
		}
		all += l.Size
	}
	return all, nil
}

// read adds a small part to containerd, parses it and returns its text.
func (s *fetcher) read(ctx context.Context, from remotes.Fetcher, d ocispec.Descriptor, into any) ([]byte, error) {
	if err := s.ingest(ctx, from, d); err != nil {
		return nil, err
	}
	b, err := content.ReadBlob(ctx, s.client.ContentStore(), d)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(b, into); err != nil {
		return nil, fmt.Errorf("%w: %w", image.ErrNoImage, err)
	}
	return b, nil
}

// ingest adds a part to containerd, unless it is there. The part then belongs to the lease in ctx.
func (s *fetcher) ingest(ctx context.Context, from remotes.Fetcher, d ocispec.Descriptor) (err error) {
	for range attempts {
		err = s.ingestOnce(ctx, from, d)
		if err == nil || ctx.Err() != nil || !errors.As(err, new(*brokenError)) {
			return err
		}
	}
	return err
}

func (s *fetcher) ingestOnce(ctx context.Context, from remotes.Fetcher, d ocispec.Descriptor) error {
	w, err := s.writer(ctx, d)
	if errdefs.IsAlreadyExists(err) {
		id, _ := leases.FromContext(ctx)
		return s.client.LeasesService().AddResource(ctx, leases.Lease{ID: id}, leases.Resource{ID: d.Digest.String(), Type: "content"})
	}
	if err != nil {
		return err
	}
	defer w.Close()
	state, err := w.Status()
	if err != nil {
		return err
	}
	if state.Offset == d.Size { // another namespace has it, or an earlier attempt
		err := w.Commit(ctx, d.Size, d.Digest)
		if errdefs.IsAlreadyExists(err) {
			return nil
		}
		return err
	}
	r, err := from.Fetch(ctx, d)
	if err != nil {
		return err
	}
	defer r.Close()
	watched := &watchedReader{Reader: r}
	err = content.Copy(ctx, w, watched, d.Size, d.Digest)
	if err != nil && watched.err != nil {
		return &brokenError{err}
	}
	return err
}

// lockWait is the time between attempts to write a part that another process writes.
const lockWait = 100 * time.Millisecond

// writer opens a part for writing. While another process writes it, writer waits.
func (s *fetcher) writer(ctx context.Context, d ocispec.Descriptor) (content.Writer, error) {
	for {
		w, err := s.client.ContentStore().Writer(ctx, content.WithRef(remotes.MakeRefKey(ctx, d)), content.WithDescriptor(d))
		// containerd says the same of a locked part as gRPC of a containerd that is away.
		if err == nil || !errdefs.IsUnavailable(err) || s.probe(ctx) != nil {
			return w, err
		}
		select {
		case <-time.After(lockWait):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// brokenError is an error of a transfer that another attempt may complete.
type brokenError struct{ error }

func (e *brokenError) Unwrap() error { return e.error }

// watchedReader notes its error.
type watchedReader struct {
	io.Reader

	err error
}

// Read implements io.Reader.
func (r *watchedReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		r.err = err
	}
	return n, err
}
