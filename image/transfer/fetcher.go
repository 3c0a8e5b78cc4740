package transfer

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/disk"
	"github.com/stagecoach-serving/stagecoach/internal/flight"
)

// Defaults of [FetcherConfig].
const (
	DefaultStall = 15 * time.Second
	// How long a fetch goes on, also if nobody waits for it any more.
	DefaultLimit = time.Hour
)

// logEvery is the time between two lines of the log about one fetch.
const logEvery = 10 * time.Second

// FetcherConfig configures a Fetcher.
type FetcherConfig struct {
	Store *image.Store
	Log   *slog.Logger
	Stall time.Duration // a source that sends nothing for so long is given up; 0: [DefaultStall]
	Limit time.Duration // of a fetch; 0: [DefaultLimit]
}

// Fetcher gets images into a store. It is safe for concurrent use.
type Fetcher struct {
	cfg    FetcherConfig
	images *flight.Group[string]
}

// NewFetcher returns a Fetcher. The caller closes it before the store.
func NewFetcher(cfg FetcherConfig) *Fetcher {
	cfg.Stall = cmp.Or(cfg.Stall, DefaultStall)
	cfg.Limit = cmp.Or(cfg.Limit, DefaultLimit)
	return &Fetcher{cfg, flight.New[string]()}
}

// Close ends all fetches and waits for them.
func (f *Fetcher) Close() { f.images.Close() }

// Fetch returns when the store has the image with a digest. It asks the sources in order, and goes
// on with the next one where a source fails. All callers that ask for a digest at the same time
// share one fetch. The fetch goes on if ctx ends, so that the next caller finds its result.
//
// The error wraps [image.ErrNoImage] if no source has the image, and [ErrUnavailable] if
// another attempt may help. It names each source and what was wrong with it.
func (f *Fetcher) Fetch(ctx context.Context, digest string, sources []Source) error {
	if image.Has(f.cfg.Store, digest) {
		return nil
	}
	_, err := f.images.Do(ctx, digest, f.cfg.Limit, func(ctx context.Context) (string, error) {
		if image.Has(f.cfg.Store, digest) {
			return digest, nil // an earlier fetch has ended just now
		}
		t := f.newTransfer(ctx, digest, sources)
		defer t.close()
		return digest, t.run()
	})
	return err
}

// Folder returns the digest of the image that a folder of images is now, at a source which has the
// folder.
func (f *Fetcher) Folder(ctx context.Context, name string, from Source) (digest string, err error) {
	a := &asked{Source: from}
	defer a.close()
	e, err := a.Reach(ctx)
	if err != nil {
		return "", fmt.Errorf("image %q: %s: %w", name, from.Name, err)
	}
	base, _, _ := strings.Cut(e.Base, "/v2/")
	a.endpoint, a.reached = Endpoint{e.Client, base}, true
	r, _, err := a.get(ctx, folderPath(name), 0)
	if err != nil {
		return "", fmt.Errorf("image %q: %s: %w", name, from.Name, err)
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, image.MaxManifest))
	if err != nil {
		return "", fmt.Errorf("image %q: %s: %w", name, from.Name, err)
	}
	return digestOf(b), nil
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// transfer is the fetch of one image. Its parts arrive one after the other.
type transfer struct {
	*Fetcher

	ctx     context.Context
	log     *slog.Logger
	digest  string
	sources []*asked
	part    *body // the latest
	pure    bool  // each part comes from one source, so that the source of wrong bytes is known

	all, there int64 // bytes of all parts; of those that the store had or has received
	began      time.Time
	mu         sync.Mutex // guards said and from
	said       time.Time
	from       []string // names of the sources that have sent something
}

func (f *Fetcher) newTransfer(ctx context.Context, digest string, sources []Source) *transfer {
	t := &transfer{Fetcher: f, ctx: ctx, digest: digest, log: f.cfg.Log.With("digest", digest), began: time.Now()}
	for _, s := range sources {
		t.sources = append(t.sources, &asked{Source: s})
	}
	return t
}

func (t *transfer) close() {
	for _, a := range t.sources {
		a.close()
	}
}

// run fetches the image.
func (t *transfer) run() error {
	manifest, err := t.manifest()
	if err != nil {
		return err
	}
	lacks, all, err := image.Missing(t.cfg.Store, manifest)
	if err != nil {
		return fmt.Errorf("image %s: %w", t.digest, err)
	}
	t.all, t.there, t.said = all, all, time.Now()
	for _, p := range lacks {
		t.there -= p.Size
	}
	missing := t.all - t.there
	t.log.Info("image is fetched", "bytes", all, "missing", missing, "sources", t.names())
	for {
		err = image.Receive(t.ctx, t.cfg.Store, manifest, t.open)
		if err == nil {
			took := time.Since(t.began)
			t.log.Info("image has arrived", "bytes", missing, "from", t.from, "took", took.Round(time.Millisecond), "MB/s", int(float64(missing)/1e6/max(took.Seconds(), 1e-3)))
			return nil
		}
		if !t.blame(err) {
			return t.explain(err)
		}
		t.log.Warn("a part of an image is refused", "error", err)
	}
}

// names returns the names of the sources.
func (t *transfer) names() []string {
	var out []string
	for _, a := range t.sources {
		out = append(out, a.Name)
	}
	return out
}

// blame finds the source of wrong bytes, and reports whether another attempt may help.
func (t *transfer) blame(err error) bool {
	restart := errors.Is(err, errRestart)
	if t.ctx.Err() != nil || t.part == nil || !restart && !errors.Is(err, image.ErrCorrupt) {
		return false
	}
	t.there -= t.part.off
	if restart {
		return true
	}
	from := t.part.from
	if len(from) > 1 && !t.pure {
		t.pure = true
		return true
	}
	for _, a := range from {
		a.gone, a.fault = true, err
	}
	return true
}

// explain adds the image's digest to an error, and says what to do on a full disk.
func (t *transfer) explain(err error) error {
	var nowhere *nowhereError
	switch {
	case errors.As(err, &nowhere):
		return nowhere
	case disk.IsFull(err):
		return fmt.Errorf("image %s: nothing more of it was stored; free some space: %w", t.digest, disk.Explain(image.Dir(t.cfg.Store), t.all-t.there, err))
	case t.ctx.Err() != nil:
		return fmt.Errorf("image %s: %d of %d bytes have arrived: %w", t.digest, t.there, t.all, context.Cause(t.ctx))
	}
	return fmt.Errorf("image %s: %w", t.digest, err)
}

// ErrUnavailable means that some source may have an image, but none could send it.
var ErrUnavailable = errors.New("it cannot be fetched now")

// nowhereError means that no source is left.
type nowhereError struct {
	digest, part string
	kind         error // image.ErrNoImage or ErrUnavailable
	faults       []string
}

// Error implements error.
func (e *nowhereError) Error() string {
	return fmt.Sprintf("image %s: %v: no source sends %s: %s", e.digest, e.kind, e.part, strings.Join(e.faults, "; "))
}

// Unwrap implements errors.Unwrap.
func (e *nowhereError) Unwrap() error { return e.kind }

// nowhere returns the error of a transfer without a source, which names the fault of each source.
func (t *transfer) nowhere(part string) error {
	e := &nowhereError{t.digest, part, image.ErrNoImage, nil}
	for _, a := range t.sources {
		if a.fault == nil {
			continue
		}
		if !errors.Is(a.fault, image.ErrNoImage) {
			e.kind = ErrUnavailable
		}
		e.faults = append(e.faults, fmt.Sprintf("%s: %v", a.Name, a.fault))
	}
	if len(e.faults) == 0 {
		e.faults = []string{"there is none to ask"}
	}
	return e
}

// manifest fetches the manifest, and checks its digest.
func (t *transfer) manifest() ([]byte, error) {
	for {
		a, err := t.next(t.ctx, "its manifest", nil)
		if err != nil {
			return nil, t.explain(err)
		}
		b, err := t.read(a)
		switch {
		case err == nil:
			return b, nil
		case t.ctx.Err() != nil:
			return nil, t.explain(err)
		case errors.Is(err, errBusy):
			a.busy, a.fault = time.Now().Add(busyAgain), err
		default:
			a.note(err)
		}
	}
}

func (t *transfer) read(a *asked) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(t.ctx, t.cfg.Stall, fmt.Errorf("no manifest came in %v", t.cfg.Stall))
	defer cancel()
	r, _, err := a.get(ctx, "/manifests/"+t.digest, 0)
	if err != nil {
		return nil, stalled(ctx, err)
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, image.MaxManifest))
	if err != nil {
		return nil, stalled(ctx, err)
	}
	if got := digestOf(b); got != t.digest {
		a.gone = true
		return nil, fmt.Errorf("%w: a manifest of %d bytes with digest %s, want %s", image.ErrCorrupt, len(b), got, t.digest)
	}
	return b, nil
}

// stalled returns why ctx has ended, if that has caused err.
func stalled(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// next returns the first source that may be asked now. It waits for one that is busy. If only is
// set, it is that source or none.
func (t *transfer) next(ctx context.Context, what string, only *asked) (*asked, error) {
	for {
		var first *asked
		for _, a := range t.sources {
			if a.gone || only != nil && a != only {
				continue
			}
			if first == nil || a.busy.Before(first.busy) && !first.busy.Before(time.Now()) {
				first = a
			}
		}
		if first == nil {
			return nil, t.nowhere(what)
		}
		wait := time.Until(first.busy)
		if wait <= 0 {
			return first, nil
		}
		timer := time.NewTimer(wait)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		}
	}
}

// open opens a part for image.Receive.
func (t *transfer) open(p image.Part) (io.ReadCloser, error) {
	t.part = &body{t: t, part: p}
	t.part.ctx, t.part.close = context.WithCancel(t.ctx)
	return t.part, nil
}

// arrived counts bytes, and logs the progress now and then.
func (t *transfer) arrived(n int, from *asked) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.there += int64(n)
	if !slices.Contains(t.from, from.Name) {
		t.from = append(t.from, from.Name)
	}
	if time.Since(t.said) >= logEvery {
		t.said = time.Now()
		t.log.Info("image arrives", "bytes", t.there, "of", t.all, "from", from.Name)
	}
}
