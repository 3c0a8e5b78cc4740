package image

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/docker/cli/cli/config"
	"github.com/docker/cli/cli/config/configfile"
	dockertypes "github.com/docker/cli/cli/config/types"
	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// Registry says how registries are reached. The zero Registry asks the registries that images name,
// with the credentials of docker login.
type Registry struct {
	// Auth is a file in the form of ~/.docker/config.json. If empty, it is DOCKER_CONFIG/config.json,
	// or else ~/.docker/config.json, if that exists.
	Auth     string
	Insecure []string      // hosts[:port] that may be used without TLS; loopback addresses always may
	Default  string        // host of images that name none; empty: such images are in no registry
	Timeout  time.Duration // per image, plus a second per 4 MiB of its layers; 0: [DefaultTimeout]
}

// DefaultTimeout bounds a pull or push of an image, in addition to the time that its layers take at
// slowest bytes per second.
const DefaultTimeout = 2 * time.Minute

// slowest is the slowest accepted transfer, in bytes per second.
const slowest = 4 << 20

// transferTime returns how long a transfer of this many bytes may take.
func transferTime(bytes int64) time.Duration {
	return time.Duration(bytes/slowest) * time.Second
}

// layerBytes returns the size of an image's layers as they are sent, in bytes. It bounds the
// result, because the manifest may be false.
func layerBytes(m *v1.Manifest) (n int64) {
	for _, l := range m.Layers {
		n += min(max(l.Size, 0), defaultLimits.bytes-n)
	}
	return n
}

// attempts is the number of attempts to fetch an image if an error is temporary. The parts that
// have arrived are kept between them.
const attempts = 3

func (r Registry) timeout() time.Duration {
	if r.Timeout > 0 {
		return r.Timeout
	}
	return DefaultTimeout
}

// reference returns the image's name in the form of a registry client.
func (r Registry) reference(image string) (name.Reference, error) {
	ref, err := ParseRef(image)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoImage, err)
	}
	if ref.Host == "" && r.Default == "" {
		return nil, fmt.Errorf("image %q: %w: it names no registry; want REGISTRY/%s, or a default registry in the configuration (registry.default)", image, ErrNoImage, image)
	}
	opts := []name.Option{name.WithDefaultRegistry(r.Default)}
	if slices.Contains(r.Insecure, ref.Host) || ref.Host == "" && slices.Contains(r.Insecure, r.Default) {
		opts = append(opts, name.Insecure)
	}
	out, err := name.ParseReference(ref.String(), opts...)
	if err != nil {
		return nil, fmt.Errorf("image %q: %w: %w", image, ErrNoImage, err)
	}
	return out, nil
}

// Pull fetches an image into a store and returns its digest. It does not store the name, so that
// the registry decides each time which image the name means. Concurrent pulls of one image are one
// transfer.
func (r Registry) Pull(ctx context.Context, s *Store, image string) (digest string, err error) {
	ref, err := r.reference(image)
	if err != nil {
		return "", err
	}
	return s.pulls.Do(ctx, ref.Name(), r.timeout()+transferTime(s.limits.bytes), func(ctx context.Context) (string, error) {
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		limit := time.AfterFunc(r.timeout(), func() { cancel(context.DeadlineExceeded) })
		defer limit.Stop()
		var digest string
		known := func(m *v1.Manifest) { limit.Reset(r.timeout() + transferTime(layerBytes(m))) }
		err := r.with(ctx, ref, func(opts []remote.Option) error {
			var err error
			for range attempts {
				if digest, err = pull(ctx, s, ref, known, opts); err == nil || !canRetry(ctx, err) {
					return err
				}
			}
			return err
		})
		return digest, r.explain(ctx, s, image, ref, err)
	})
}

// canRetry reports whether another attempt may fetch the rest.
func canRetry(ctx context.Context, err error) bool {
	return ctx.Err() == nil && !errors.Is(err, ErrNoImage) && errors.As(err, new(interrupted))
}

// interrupted is an error during the transfer of an image's parts.
type interrupted struct{ error }

func (i interrupted) Unwrap() error { return i.error }

// pull fetches an image. It calls known once the manifest has arrived.
func pull(ctx context.Context, s *Store, ref name.Reference, known func(*v1.Manifest), opts []remote.Option) (string, error) {
	d, err := remote.Get(ref, opts...)
	if err != nil {
		return "", err
	}
	img, err := theImage(d)
	if err != nil {
		return "", err
	}
	m, err := img.Manifest()
	if err != nil {
		return "", fmt.Errorf("%w: its manifest: %w", ErrNoImage, err)
	}
	if m.Config.Size > maxConfig {
		return "", fmt.Errorf("%w: a configuration of %d bytes, want at most %d", ErrNoImage, m.Config.Size, maxConfig)
	}
	known(m)
	if err := runsHere(img, Platform); err != nil {
		return "", interrupted{err}
	}
	digest, err := s.Add(ctx, &Image{img}, "")
	if err != nil {
		return "", interrupted{err}
	}
	return digest, nil
}

func theImage(d *remote.Descriptor) (v1.Image, error) {
	switch {
	case d.MediaType.IsImage():
		return d.Image()
	case d.MediaType.IsIndex():
		index, err := d.ImageIndex()
		if err != nil {
			return nil, err
		}
		return forPlatform(index)
	}
	return nil, fmt.Errorf("%w: it is a %s", ErrNoImage, d.MediaType)
}

// Push sends an image of a store to the registry that its name contains.
func (r Registry) Push(ctx context.Context, s *Store, image string) (digest string, err error) {
	ref, err := r.reference(image)
	if err != nil {
		return "", err
	}
	if digest, err = s.Resolve(image); err != nil {
		return "", err
	}
	img, err := s.Image(digest)
	if err != nil {
		return "", err
	}
	m, err := img.of.Manifest()
	if err != nil {
		return "", fmt.Errorf("image %s: %w", digest, err)
	}
	there, err := s.otherRepositories(r, img, ref)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, r.timeout()+transferTime(layerBytes(m)))
	defer cancel()
	err = r.with(ctx, ref, func(opts []remote.Option) error { return push(ref, img, there, opts) })
	return digest, r.explain(ctx, s, image, ref, err)
}

// with calls f with the options for requests to ref's registry.
func (r Registry) with(ctx context.Context, ref name.Reference, f func([]remote.Option) error) error {
	who, err := r.credentials(ref.Context())
	if err != nil {
		return err
	}
	p, err := v1.ParsePlatform(Platform)
	if err != nil {
		return err
	}
	t := newTransport()
	defer t.CloseIdleConnections()
	return f([]remote.Option{
		remote.WithContext(ctx), remote.WithAuth(who), remote.WithPlatform(*p), remote.WithUserAgent("stagecoach"),
		remote.WithTransport(guard{t, r.Insecure}), remote.WithJobs(2),
		remote.WithRetryBackoff(remote.Backoff{Duration: 200 * time.Millisecond, Factor: 3, Jitter: 0.2, Steps: attempts}),
	})
}

func newTransport() *http.Transport {
	return &http.Transport{
		Proxy: http.ProxyFromEnvironment, ForceAttemptHTTP2: true, TLSHandshakeTimeout: 10 * time.Second,
		DialContext: (&net.Dialer{Timeout: 10 * time.Second}).DialContext, MaxIdleConnsPerHost: 4, IdleConnTimeout: 10 * time.Second,
	}
}

// guard refuses requests without TLS, except to hosts for which plain HTTP is allowed.
type guard struct {
	http.RoundTripper
	insecure []string
}

var errPlain = errors.New("TLS is wanted")

// RoundTrip implements http.RoundTripper.
func (g guard) RoundTrip(q *http.Request) (*http.Response, error) {
	if q.URL.Scheme != "https" && !slices.Contains(g.insecure, q.URL.Host) && !loopback(q.URL.Hostname()) {
		return nil, fmt.Errorf("%s://%s: %w: list the host among the insecure registries (registry.insecure) if it has none", q.URL.Scheme, q.URL.Host, errPlain)
	}
	return g.RoundTripper.RoundTrip(q)
}

func loopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// auth returns the file with credentials, or "" if there is none.
func (r Registry) auth() string {
	if r.Auth != "" {
		return r.Auth
	}
	dir := os.Getenv("DOCKER_CONFIG")
	if dir == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return ""
		}
		dir = filepath.Join(home, ".docker")
	}
	file := filepath.Join(dir, "config.json")
	if _, err := os.Stat(file); err != nil {
		return ""
	}
	return file
}

var errCredentials = errors.New("credentials")

// credentials returns the credentials for a repository. Without any, requests are anonymous.
func (r Registry) credentials(repo name.Repository) (authn.Authenticator, error) {
	file := r.auth()
	if file == "" {
		return authn.Anonymous, nil
	}
	f, err := os.Open(file)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errCredentials, err)
	}
	defer f.Close()
	all, err := config.LoadFromReader(f)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", errCredentials, file, err)
	}
	all.Filename = file
	c, err := credentialsFor(all, repo)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", errCredentials, file, err)
	}
	if c == (dockertypes.AuthConfig{}) {
		return authn.Anonymous, nil
	}
	return authn.FromConfig(authn.AuthConfig{
		Username: c.Username, Password: c.Password, Auth: c.Auth, IdentityToken: c.IdentityToken, RegistryToken: c.RegistryToken,
	}), nil
}

func credentialsFor(all *configfile.ConfigFile, repo name.Repository) (c dockertypes.AuthConfig, err error) {
	for _, key := range []string{repo.String(), repo.RegistryStr()} {
		if key == name.DefaultRegistry {
			key = authn.DefaultAuthKey
		}
		if c, err = all.GetAuthConfig(key); err != nil {
			return c, err
		}
		c.ServerAddress = "" // the field is always set
		if c != (dockertypes.AuthConfig{}) {
			break
		}
	}
	return c, nil
}

// explain adds the image, the registry, the response and the remedy to an error.
func (r Registry) explain(ctx context.Context, s *Store, image string, ref name.Reference, err error) error {
	if err == nil || disk.IsFull(err) {
		return s.explain(image, err)
	}
	var answer *transport.Error
	var dns *net.DNSError
	var cert *tls.CertificateVerificationError
	var authority x509.UnknownAuthorityError
	host, kind, advice := ref.Context().RegistryStr(), ErrUnavailable, "try again, or load the image from a file (stagecoach image load)"
	switch {
	case errors.Is(err, ErrNoImage):
		kind, advice = ErrNoImage, "build it for this platform, or name another"
	// A connection timeout is this error, too.
	case errors.Is(context.Cause(ctx), context.DeadlineExceeded):
		advice = fmt.Sprintf("it was not done in %v and a second per 4 MiB: try again, because the parts that have arrived are kept, or allow more time (registry.timeout)", r.timeout())
	case errors.As(err, &answer):
		switch answer.StatusCode {
		case http.StatusNotFound:
			kind, advice = ErrNoImage, "push it there, or correct the name and tag"
		case http.StatusUnauthorized, http.StatusForbidden:
			kind, advice = ErrNoImage, fmt.Sprintf("log in (docker login %s), or name the file with credentials (--registry-config); asked with %s", host, r.asked(ref))
		}
		err = fmt.Errorf("%d %s: %w", answer.StatusCode, http.StatusText(answer.StatusCode), err)
	case errors.Is(err, errCredentials):
		advice = "correct the file or name another (--registry-config, registry.auth)"
	case errors.As(err, &dns):
		advice = "correct the name of the registry, or the machine's DNS"
	case errors.Is(err, errPlain), errors.As(err, &cert), errors.As(err, &authority):
		advice = "give it a certificate that this machine trusts, or list it among the insecure registries (registry.insecure)"
	case errors.Is(err, errCorrupt):
		advice = "the content does not match the digest: push the image again"
	}
	return fmt.Errorf("image %q from %s: %w: %w; %s", image, host, kind, err, advice)
}

func (r Registry) asked(ref name.Reference) string {
	who, err := r.credentials(ref.Context())
	switch file := r.auth(); {
	case err != nil:
		return err.Error()
	case file == "":
		return "no credentials: there is no such file"
	case who == authn.Anonymous:
		return fmt.Sprintf("no credentials: %s has none for %s", file, ref.Context().RegistryStr())
	default:
		return "those of " + file
	}
}
