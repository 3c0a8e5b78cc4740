package image

import (
	"archive/tar"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"sync"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// Bytes arrive in chunks of aheadChunk bytes. At most aheadChunks of them are in memory per part.
const (
	aheadChunk  = 256 << 10
	aheadChunks = 8
)

// ahead reads a part of an image. One goroutine reads from the network and one computes the digest,
// so that receiving, checking and writing use different processors. Each chunk is copied only once.
type ahead struct {
	from io.ReadCloser
	full chan *piece // for Read, in order
	hash chan *piece // for the digest, in order
	free chan *piece
	quit chan struct{}
	stop func()
	work sync.WaitGroup

	now  *piece // that Read is in
	rest []byte // of now

	// These are valid after the goroutines have ended.
	err error // of from; io.EOF: it has ended
	sum hash.Hash
	n   int64
}

// piece is a chunk that two readers use.
type piece struct {
	b    []byte
	used chan struct{} // has a token for the reader that is done first
}

// readAhead returns a reader of r that computes the digest of what it reads. The caller closes it.
func readAhead(r io.ReadCloser, size int64) *ahead {
	a := &ahead{
		from: r, full: make(chan *piece, aheadChunks), hash: make(chan *piece, aheadChunks), free: make(chan *piece, aheadChunks),
		quit: make(chan struct{}), sum: sha256.New(),
	}
	a.stop = sync.OnceFunc(func() { close(a.quit) })
	chunk := max(min(size+1, aheadChunk), 1)
	for range min(aheadChunks, size/chunk+2) {
		a.free <- &piece{b: make([]byte, chunk), used: make(chan struct{}, 1)}
	}
	a.work.Go(a.receive)
	a.work.Go(func() {
		for p := range a.hash {
			_, _ = a.sum.Write(p.b) // it has no errors
			a.n += int64(len(p.b))
			a.release(p)
		}
	})
	return a
}

// receive reads chunks until the end.
func (a *ahead) receive() {
	defer close(a.full)
	defer close(a.hash)
	for {
		var p *piece
		select {
		case p = <-a.free:
		case <-a.quit:
			a.err = os.ErrClosed
			return
		}
		n, err := readFull(a.from, p.b[:cap(p.b)])
		if n > 0 {
			p.b = p.b[:n]
			a.full <- p // both have room for all pieces
			a.hash <- p
		}
		if err != nil {
			a.err = err
			return
		}
	}
}

// readFull reads until p is full or the reader ends.
func readFull(r io.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var m int
		m, err = r.Read(p[n:])
		n += m
	}
	return n, err
}

// release says that one of the two readers of a piece is done. The second one makes it free.
func (a *ahead) release(p *piece) {
	select {
	case p.used <- struct{}{}:
	default:
		<-p.used
		a.free <- p
	}
}

// next makes sure that rest has bytes, unless the part has ended.
func (a *ahead) next() error {
	if len(a.rest) > 0 {
		return nil
	}
	if a.now != nil {
		a.release(a.now)
		a.now = nil
	}
	p, ok := <-a.full
	if !ok {
		return a.err
	}
	a.now, a.rest = p, p.b
	return nil
}

// Read implements io.Reader.
func (a *ahead) Read(p []byte) (int, error) {
	if err := a.next(); err != nil {
		return 0, err
	}
	n := copy(p, a.rest)
	a.rest = a.rest[n:]
	return n, nil
}

// WriteTo implements io.WriterTo, which io.Copy uses.
func (a *ahead) WriteTo(w io.Writer) (n int64, err error) {
	for {
		if err := a.next(); errors.Is(err, io.EOF) {
			return n, nil
		} else if err != nil {
			return n, err
		}
		m, err := w.Write(a.rest)
		n += int64(m)
		a.rest = a.rest[m:]
		if err != nil {
			return n, err
		}
	}
}

// digest returns the digest and the number of all bytes, after Read has returned io.EOF.
func (a *ahead) digest() (digest string, n int64) {
	a.work.Wait()
	return sum(a.sum), a.n
}

// suspect returns the error of an archive that could not be unpacked. If that has to do with the
// archive's bytes, it reads the rest: other bytes than those of the wanted digest are the cause.
func (a *ahead) suspect(want v1.Descriptor, err error) error {
	if disk.IsFull(err) {
		return err
	}
	if _, bad := io.Copy(io.Discard, a); bad != nil {
		return bad
	}
	if got, n := a.digest(); got != want.Digest.String() {
		return fmt.Errorf("%w: %w", mismatch(n, got, want), err)
	}
	return err
}

// Close ends the goroutines and closes the source. It may be called while Read waits.
func (a *ahead) Close() error {
	a.stop()
	err := a.from.Close()
	a.work.Wait()
	return err
}

// writeback is how many bytes of a file are given to the disk at a time, so that the final sync
// does not have to write all of them.
const writeback = 16 << 20

// early writes to a file, and has the kernel begin to write to the disk meanwhile.
type early struct {
	file     *os.File
	at, done int64
}

// Write implements io.Writer.
func (e *early) Write(p []byte) (int, error) {
	n, err := e.file.Write(p)
	e.at += int64(n)
	if e.at-e.done >= writeback {
		// This is a hint. The final sync reports errors.
		_ = unix.SyncFileRange(int(e.file.Fd()), e.done, e.at-e.done, unix.SYNC_FILE_RANGE_WRITE)
		e.done = e.at
	}
	return n, err
}

// tap hashes what is read through it while on is set.
type tap struct {
	from io.Reader
	on   bool
	hash hash.Hash
}

// Read implements io.Reader.
func (t *tap) Read(p []byte) (int, error) {
	n, err := t.from.Read(p)
	if t.on {
		_, _ = t.hash.Write(p[:n]) // it has no errors
	}
	return n, err
}

// frame returns a digest of a layer's archive without the content of its files: of headers and
// padding. It sets the size.
func (l *layer) frame() (string, error) {
	a, err := newArchived(l)
	if err != nil {
		return "", err
	}
	h, zeros := sha256.New(), make([]byte, 2*block)
	for i := range l.entries {
		if err := a.load(i); err != nil {
			return "", err
		}
		_, _ = h.Write(a.head)
		n := content(&l.entries[i])
		_, _ = h.Write(zeros[:padded(n)-n])
	}
	_, _ = h.Write(zeros)
	l.size = a.size()
	return sum(h), nil
}

// fewFiles is how many files are synced one by one. For more, syncing the whole disk is faster.
const fewFiles = 256

// syncLayer syncs the folder of a layer to the disk.
func syncLayer(dir string, l *layer) error {
	if len(l.entries) > fewFiles {
		return syncFolder(dir)
	}
	errs := []error{syncFile(dir), syncFile(dir + "/list"), syncFile(dir + "/fs")}
	for _, e := range l.entries {
		if e.head.Typeflag != tar.TypeSymlink {
			errs = append(errs, syncFile(e.path))
		}
	}
	return errors.Join(errs...)
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// limited returns a reader of at most n bytes of r.
func limited(r io.ReadCloser, n int64) io.ReadCloser {
	return struct {
		io.Reader
		io.Closer
	}{io.LimitReader(r, n), r}
}
