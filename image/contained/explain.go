package contained

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// corruptError means that something does not match its digest.
type corruptError struct{ error }

func (e *corruptError) Unwrap() error { return e.error }

// askError is an error of a registry.
type askError struct {
	error

	host string
}

func (e *askError) Unwrap() error { return e.error }

// unpackError means that containerd cannot make a snapshot.
type unpackError struct{ error }

func (e *unpackError) Unwrap() error { return e.error }

// probeTimeout is how long a containerd that works may take to say its version.
const probeTimeout = 2 * time.Second

// probe returns why containerd does not answer, or nil.
func (s *fetcher) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeTimeout)
	defer cancel()
	_, err := s.client.Version(ctx)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("no answer in %v", probeTimeout)
	}
	return err
}

// explain adds the image and the remedy to an error. An empty name means that the error concerns
// several images.
func (s *fetcher) explain(ctx context.Context, name string, err error) error {
	if err == nil {
		return nil
	}
	subject := "images in containerd"
	if name != "" {
		subject = fmt.Sprintf("image %q", name)
	}
	advice, kind := s.judge(ctx, err)
	if full(err) {
		root := s.diskRoot(ctx)
		err = disk.Explain(root, 0, fmt.Errorf("%w: %w", syscall.ENOSPC, err))
	}
	if kind == nil || errors.Is(err, kind) {
		return fmt.Errorf("%s: %w; %s", subject, err, advice)
	}
	return fmt.Errorf("%s: %w: %w; %s", subject, kind, err, advice)
}

// judge returns what helps against an error, and its kind. The kind is nil, image.ErrNoImage or
// image.ErrUnavailable.
func (s *fetcher) judge(ctx context.Context, err error) (advice string, kind error) {
	var ask *askError
	var unpack *unpackError
	late := errors.Is(err, context.DeadlineExceeded) || errdefs.IsDeadlineExceeded(err)
	switch {
	case errors.Is(err, image.ErrNoImage):
		return "build it for this platform, or name another", image.ErrNoImage
	case full(err):
		return "nothing of it was kept; free some space there, or give containerd another disk", nil
	case corrupt(err):
		return "the content does not match its digest: push the image again", image.ErrNoImage
	case errors.As(err, &ask) && !late:
		return s.judgeRegistry(ask)
	}
	if away := s.probe(ctx); away != nil {
		return fmt.Sprintf("containerd at %s does not answer (%v): start it, correct --containerd-address, or try again if it is busy; stagecoach doctor says more", s.cfg.Address, away), image.ErrUnavailable
	}
	switch {
	case late:
		return fmt.Sprintf("it was not done in %v and a second per 4 MiB: try again, or allow more time (registry.timeout)", s.cfg.Registry.Limit(0)), image.ErrUnavailable
	case errors.As(err, &unpack):
		if has, ok := s.hasSnapshotter(ctx); !ok {
			return fmt.Sprintf("containerd has no snapshotter %q, only %q: name one of these (--containerd-snapshotter)", s.cfg.Snapshotter, has), image.ErrUnavailable
		}
		return "containerd cannot unpack it: correct the layer and push the image again, or look into containerd's log", image.ErrNoImage
	}
	return "try again; containerd's log may say more", image.ErrUnavailable
}

// judgeRegistry does what judge does, for an error of a registry.
func (s *fetcher) judgeRegistry(err *askError) (advice string, kind error) {
	var answer remoteerrors.ErrUnexpectedStatus
	var dns *net.DNSError
	var cert *tls.CertificateVerificationError
	var authority x509.UnknownAuthorityError
	denied := errors.Is(err, docker.ErrInvalidAuthorization)
	if errors.As(err, &answer) {
		denied = denied || answer.StatusCode == http.StatusUnauthorized || answer.StatusCode == http.StatusForbidden
	}
	switch {
	case errdefs.IsNotFound(err):
		return fmt.Sprintf("push it to %s, or correct the name and tag", err.host), image.ErrNoImage
	case denied:
		file := s.cfg.Registry.Credentials()
		if file == "" {
			file = "no file"
		}
		return fmt.Sprintf("log in (docker login %s), or name the file with credentials (--registry-config); asked with those of %s", err.host, file), image.ErrNoImage
	case errors.As(err, &dns):
		return "correct the name of the registry, or the machine's DNS", image.ErrUnavailable
	case errors.As(err, &cert), errors.As(err, &authority), errors.Is(err, http.ErrSchemeMismatch):
		return fmt.Sprintf("give %s a certificate that this machine trusts, or configure it in %s", err.host, s.cfg.HostsDir), image.ErrUnavailable
	}
	return fmt.Sprintf("try again, or name a mirror of %s in %s", err.host, s.cfg.HostsDir), image.ErrUnavailable
}

// full reports whether containerd's disk is full. gRPC carries the text only.
func full(err error) bool {
	text := err.Error()
	return disk.IsFull(err) || slices.ContainsFunc([]syscall.Errno{syscall.ENOSPC, syscall.EDQUOT}, func(number syscall.Errno) bool {
		return strings.Contains(text, number.Error())
	})
}

// corrupt reports whether content does not match its digest or size. containerd has no kind of
// error for that.
func corrupt(err error) bool {
	if errors.As(err, new(*corruptError)) {
		return true
	}
	text := err.Error()
	return strings.Contains(text, "unexpected commit digest") || strings.Contains(text, "unexpected commit size") || strings.Contains(text, "wrong diff id")
}

// snapshotters is the type of containerd's plugins that unpack layers.
const snapshotters = "io.containerd.snapshotter.v1"

// hasSnapshotter returns the names of containerd's snapshotters, and whether the wanted one is
// among them.
func (s *fetcher) hasSnapshotter(ctx context.Context) (has []string, ok bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeTimeout)
	defer cancel()
	all, err := plugins(ctx, s.client, snapshotters)
	if err != nil {
		return nil, true // another error says more
	}
	for id := range all {
		has = append(has, id)
		ok = ok || id == s.cfg.Snapshotter
	}
	return has, ok
}

// diskRoot returns the folder of containerd's snapshotter, or of the views if containerd does not
// say it.
func (s *fetcher) diskRoot(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), probeTimeout)
	defer cancel()
	if all, err := plugins(ctx, s.client, snapshotters); err == nil && all[s.cfg.Snapshotter] != "" {
		return all[s.cfg.Snapshotter]
	}
	return s.cfg.Dir
}
