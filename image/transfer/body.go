package transfer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
)

// body reads one part of an image. If a connection breaks, it asks for the rest, from the same
// source or the next one. It ends after the part's size.
type body struct {
	t     *transfer
	ctx   context.Context // of all requests
	close context.CancelFunc
	part  image.Part
	off   int64    // bytes that were read
	from  []*asked // sources of these bytes

	now    *asked // source of open
	open   io.ReadCloser
	asking context.Context         // of open
	cancel context.CancelCauseFunc // of asking
	timer  *time.Timer             // calls cancel if the source stalls
}

// errRestart means that a part has to begin again, at another source.
var errRestart = errors.New("its source has gone")

// Read implements io.Reader.
func (b *body) Read(p []byte) (int, error) {
	for {
		if b.off == b.part.Size {
			return 0, io.EOF
		}
		if b.open == nil {
			if err := b.connect(); err != nil {
				return 0, err
			}
		}
		b.timer.Reset(b.t.cfg.Stall)
		n, err := b.open.Read(p[:min(int64(len(p)), b.part.Size-b.off)])
		b.timer.Stop() // the disk may be slower than the source
		if n > 0 {
			b.off += int64(n)
			b.now.failed = 0
			if !slices.Contains(b.from, b.now) {
				b.from = append(b.from, b.now)
			}
			b.t.arrived(n, b.now)
			if b.off == b.part.Size && errors.Is(err, io.EOF) {
				b.keep()
			}
			return n, nil
		}
		if err == nil {
			continue
		}
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		b.broken(err)
	}
}

// broken gives up the connection.
func (b *body) broken(err error) {
	a := b.now
	if b.ctx.Err() != nil {
		b.end()
		return // nobody reads it any more
	}
	err = fmt.Errorf("%s broke off after %d of %d bytes: %w", b.part.Digest, b.off, b.part.Size, stalled(b.asking, err))
	b.t.log.Warn("transfer of an image broke off", "from", b.now.Name, "error", err)
	b.end()
	a.note(err)
}

// stallError means that a source has sent nothing for a while.
type stallError struct{ after time.Duration }

func (e *stallError) Error() string { return fmt.Sprintf("nothing came in %v", e.after) }

// connect asks the next source for the rest of the part.
func (b *body) connect() error {
	for {
		if err := b.ctx.Err(); err != nil {
			return err
		}
		var only *asked
		if b.t.pure && len(b.from) > 0 {
			if only = b.from[0]; only.gone {
				return fmt.Errorf("%s: %w", b.part.Digest, errRestart)
			}
		}
		a, err := b.t.next(b.ctx, b.part.Digest, only)
		if err != nil {
			return err
		}
		if err = b.ask(a); err == nil {
			return nil
		}
		if errors.Is(err, errBusy) {
			a.busy, a.fault = time.Now().Add(busyAgain), err
			continue
		}
		if b.ctx.Err() == nil {
			a.note(fmt.Errorf("%s: %w", b.part.Digest, err))
		}
	}
}

func (b *body) ask(a *asked) error {
	ctx, cancel := context.WithCancelCause(b.ctx)
	stall := &stallError{b.t.cfg.Stall}
	timer := time.AfterFunc(b.t.cfg.Stall, func() { cancel(stall) })
	r, size, err := a.get(ctx, "/blobs/"+b.part.Digest, b.off)
	if err == nil && size >= 0 && size != b.part.Size {
		_ = r.Close()
		a.gone = true
		err = fmt.Errorf("%w: it has %d bytes of %s, want %d", image.ErrCorrupt, size, b.part.Digest, b.part.Size)
	}
	if err != nil {
		timer.Stop()
		err = stalled(ctx, err)
		cancel(nil)
		return err
	}
	b.now, b.open, b.asking, b.cancel, b.timer = a, r, ctx, cancel, timer
	return nil
}

// keep closes the connection's answer after its end, so that the connection can be used again.
// Cancelling the request could close the connection: that is left to b.ctx.
func (b *body) keep() {
	b.timer.Stop()
	_ = b.open.Close()
	b.open, b.now = nil, nil
}

// end gives up the connection's answer.
func (b *body) end() {
	if b.open == nil {
		return
	}
	b.timer.Stop()
	b.cancel(nil)
	_ = b.open.Close()
	b.open, b.now = nil, nil
}

// Close ends the part. It may be called while Read waits.
func (b *body) Close() error {
	b.close()
	return nil
}
