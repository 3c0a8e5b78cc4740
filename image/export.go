package image

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// Limits of an image from outside, for those who read its manifest themselves.
const (
	MaxLayers = maxLayers
	MaxConfig = maxConfig // bytes
	MaxBytes  = 128 << 30 // of all layers as they are sent
)

// Export is an image of a store whose parts are being read. Nothing of the store is collected
// before [Export.Close].
type Export struct {
	MediaType string // of its manifest
	Size      int64  // of its manifest, in bytes

	store   *Store
	release func()
}

// OpenExport opens an image of a store, by its digest, for reading.
func OpenExport(ctx context.Context, s *Store, digest string) (*Export, error) {
	release, err := s.use(ctx)
	if err != nil {
		return nil, err
	}
	e := &Export{store: s, release: release}
	if err := e.describe(digest); err != nil {
		release()
		return nil, err
	}
	return e, nil
}

func (e *Export) describe(digest string) error {
	img, err := e.store.Image(digest)
	if err != nil {
		return err
	}
	m, err := img.of.Manifest()
	if err != nil {
		return fmt.Errorf("image %s: %w", digest, err)
	}
	info, err := os.Stat(e.store.blob(digest))
	if err != nil {
		return fmt.Errorf("image %s: %w", digest, err)
	}
	kind := m.MediaType
	if kind == "" {
		kind = types.OCIManifestSchema1 // whose field is optional
	}
	e.MediaType, e.Size = string(kind), info.Size()
	return nil
}

// Open opens a part of the image by its digest: the manifest, the configuration or a layer.
func (e *Export) Open(digest string) (io.ReadCloser, error) {
	if !digestForm.MatchString(digest) {
		return nil, fmt.Errorf("digest %q, want a SHA-256", digest)
	}
	return e.store.openBlob(digest)
}

// Close lets the store be collected again.
func (e *Export) Close() { e.release() }

// Client returns a client with the credentials for an image's repository, and the URL of the
// repository. It asks the registry how to log in.
func (r Registry) Client(ctx context.Context, image string) (c *http.Client, repository string, err error) {
	ref, err := r.reference(image)
	if err != nil {
		return nil, "", err
	}
	who, err := r.credentials(ref.Context())
	if err != nil {
		return nil, "", err
	}
	registry := ref.Context().Registry
	t, err := transport.NewWithContext(ctx, registry, who, guard{newTransport(), r.Insecure}, []string{ref.Scope(transport.PullScope)})
	if err != nil {
		return nil, "", fmt.Errorf("image %q from %s: %w: %w", image, registry.RegistryStr(), ErrUnavailable, err)
	}
	url := fmt.Sprintf("%s://%s/v2/%s", registry.Scheme(), registry.RegistryStr(), ref.Context().RepositoryStr())
	return &http.Client{Transport: t}, url, nil
}

// Login returns the user and the password with which a host is asked for images of a repository,
// such as team/ocr. The user of an identity token is empty. Both are empty if there are no
// credentials.
func (r Registry) Login(host, repository string) (user, secret string, err error) {
	if host == "registry-1."+dockerHub || host == dockerHub {
		host = name.DefaultRegistry
	}
	repo, err := name.NewRepository(host + "/" + repository)
	if err != nil {
		return "", "", fmt.Errorf("registry %q: %w", host, err)
	}
	who, err := r.credentials(repo)
	if err != nil {
		return "", "", err
	}
	c, err := who.Authorization()
	if err != nil {
		return "", "", fmt.Errorf("%w: %w", errCredentials, err)
	}
	if c.IdentityToken != "" {
		return "", c.IdentityToken, nil
	}
	return c.Username, c.Password, nil
}

// Credentials returns the file with credentials, or "" if there is none.
func (r Registry) Credentials() string { return r.auth() }

// Limit returns how long a transfer of this many bytes may take.
func (r Registry) Limit(bytes int64) time.Duration { return r.timeout() + transferTime(bytes) }

// Locate returns the registry's host, the repository, and the tag or digest that an image's name
// stands for. The host of Docker Hub is docker.io. The error wraps [ErrNoImage].
func (r Registry) Locate(image string) (host, repository, object string, err error) {
	ref, err := r.reference(image)
	if err != nil {
		return "", "", "", err
	}
	if host = ref.Context().RegistryStr(); host == name.DefaultRegistry {
		host = dockerHub
	}
	return host, ref.Context().RepositoryStr(), ref.Identifier(), nil
}

// ParseConfig returns how an image with this configuration file is run.
func ParseConfig(file []byte) (Config, error) {
	f, err := v1.ParseConfigFile(bytes.NewReader(file))
	if err != nil {
		return Config{}, fmt.Errorf("%w: configuration: %w", ErrNoImage, err)
	}
	return configOf(f), nil
}
