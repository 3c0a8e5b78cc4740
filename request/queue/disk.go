package queue

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// Bytes that writes must leave free on the disk, by the purpose of the write. Each value leaves
// enough room for the purposes below it.
const (
	// Left free by Append, because retries, results and deletions of accepted records write too.
	acceptRoom = 64 << 20
	changeRoom = 16 << 20 // left free by changes of a record's state and by values of keys
	// Size of the file that a deletion on a full disk removes. It is below changeRoom, so that only
	// deletions use it.
	reserveBytes = 8 << 20
	deletionRoom = 1 << 20 // with this much free, a deletion does not need the reserve
)

// ErrStopped means that the streams take no writes for a reason other than a full disk.
var ErrStopped = errors.New("queue: the streams take no writes")

// Intervals of a Disk's goroutine.
const (
	diskTick = 250 * time.Millisecond // between two checks of the disk
	// between two checks of the streams while nothing is written.
	idleLook = time.Second
	// Longest wait between two attempts to open the streams again.
	reopenWait = 5 * time.Second
)

// missingTries is how many attempts in a row may leave a stream closed although the disk has room.
// After the last attempt, the other streams are used without this stream.
const missingTries = 4

// Disk watches the disk of a [Server]'s streams, and opens the streams again after a failed write.
//
// After a write error, a stream answers no further write until it is opened again, even if the disk
// has room. So a Disk detects write errors, and refuses writes with the cause until there is room.
// Then it closes and opens JetStream inside the running server. Connections are not affected, and
// neither are messages that no stream stores.
//
// With NATS outside, a Disk checks the streams of the cluster instead of a disk. While a stream has
// no leader or has refused a write, it refuses writes, until the stream is back.
type Disk struct {
	server  streams
	cluster *Cluster // NATS outside; nil: the server is embedded
	// Number of servers that keep each stream; 0: one.
	replicas int
	dir      string // folder of the streams; empty with NATS outside
	reserve  string // path of the reserve's file
	log      *slog.Logger
	wake     chan struct{}

	mu       sync.Mutex
	failed   error         // why the streams take no writes; nil: they take writes
	stopped  chan struct{} // closed while failed is set
	opened   chan struct{} // closed when the streams are opened again
	deleting bool          // a deletion waits, so the streams are opened even if the disk is full
	attempts int           // attempts to open the streams since they stopped
	next     time.Time     // time of the next attempt
	// Number of the latest consecutive attempts that had room and left a stream closed.
	missing  int
	reopened uint64    // how often the streams were opened again
	looked   time.Time // time of the last check for a write error
	wrote    time.Time // when the latest write began that asked the Disk first
	low      bool      // the log says that the disk is nearly full
}

// streams is what a Disk needs of the servers that have the streams.
type streams interface {
	// writeError returns why some stream takes no writes, or nil.
	writeError() error
	// reopen makes the streams take writes again. If only missing is an error, the other streams do.
	reopen() (failed, missing error)
}

func newDisk(s streams, dir string, log *slog.Logger) *Disk {
	return &Disk{
		server: s, dir: dir, reserve: filepath.Join(dir, "reserve"), log: log,
		wake: make(chan struct{}, 1), stopped: make(chan struct{}), opened: make(chan struct{}),
	}
}

// watch checks the disk and the streams until ctx ends.
func (d *Disk) watch(ctx context.Context) {
	tick := time.NewTicker(diskTick)
	defer tick.Stop()
	for ctx.Err() == nil {
		d.look(time.Now())
		select {
		case <-tick.C:
		case <-d.wake:
		case <-ctx.Done():
		}
	}
}

func (d *Disk) look(now time.Time) {
	if d.lookDue(now) {
		if err := d.server.writeError(); err != nil {
			d.report(err)
		}
	}
	if d.cluster != nil {
		d.retry(now)
		return
	}
	free, err := disk.Free(d.dir)
	if err != nil {
		free = 0
	}
	d.mu.Lock()
	was, failed := d.low, d.failed
	d.low = free < acceptRoom
	reopen := failed != nil && !now.Before(d.next) && (free >= changeRoom || d.deleting && free >= deletionRoom)
	d.mu.Unlock()
	if d.low && !was {
		d.log.Warn("the disk is nearly full: async requests are refused", "disk", d.dir, "free", free, "want", int64(acceptRoom), "error", err)
	} else if was && !d.low {
		d.log.Info("the disk has room again", "disk", d.dir, "free", free)
	}
	switch {
	case reopen:
		d.reopen(now, free >= changeRoom)
	case failed == nil && free >= acceptRoom+reserveBytes:
		if err := d.keepReserve(); err != nil {
			d.log.Warn("failed to reserve room for deletions on a full disk", "file", d.reserve, "error", err)
		}
	}
}

// lookDue reports whether it is time to check for a write error. A check lists the folders of all
// streams.
func (d *Disk) lookDue(now time.Time) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failed != nil || now.Sub(d.looked) < idleLook && now.Sub(d.wrote) > idleLook {
		return false
	}
	d.looked = now
	return true
}

// report records that a write to the streams has failed. From then on, writes are refused until the
// streams are opened again.
func (d *Disk) report(cause error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failed != nil {
		return
	}
	d.failed = cause
	close(d.stopped)
	select {
	case d.wake <- struct{}{}:
	default: // the goroutine is awake already
	}
	if d.cluster != nil {
		d.next = time.Now().Add(clusterPause)
		d.log.Error("the NATS cluster takes no writes; async requests and deploys are refused until it does", "cluster", d.cluster.URL(), "error", cause)
		return
	}
	d.log.Error("a write to the streams failed, so they take no more; they are opened again when the disk has room", "disk", d.dir, "want free", int64(changeRoom), "error", cause)
}

// clusterPause is how long writes are refused after a cluster has failed to store one.
const clusterPause = time.Second

// retry takes writes again once the streams of a cluster are back.
func (d *Disk) retry(now time.Time) {
	d.mu.Lock()
	due := d.failed != nil && !now.Before(d.next)
	d.mu.Unlock()
	if !due {
		return
	}
	err := d.server.writeError()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.next = time.Now().Add(diskTick)
	if err != nil {
		d.failed = err
		return
	}
	d.accept()
	d.log.Info("the NATS cluster takes writes again", "cluster", d.cluster.URL())
}

// accept takes writes again. The caller holds d.mu.
func (d *Disk) accept() {
	d.failed, d.deleting, d.missing = nil, false, 0
	d.reopened++
	d.stopped = make(chan struct{})
	close(d.opened)
	d.opened = make(chan struct{})
}

// reopen opens the streams again. If the disk has room and some streams stay closed, the Disk gives
// these streams up after missingTries attempts, because each attempt interrupts the other streams.
func (d *Disk) reopen(now time.Time, room bool) {
	err, missing := d.server.reopen()
	d.mu.Lock()
	defer d.mu.Unlock()
	// If a write fails again at once, the next attempt waits.
	d.next = now.Add(min(diskTick<<min(d.attempts, 8), reopenWait))
	d.attempts++
	if d.missing++; missing == nil || !room {
		d.missing = 0
	}
	if err == nil && d.missing < missingTries {
		err = missing
	}
	if err != nil {
		d.log.Error("failed to open the streams again; trying again", "disk", d.dir, "attempt", d.attempts, "error", err)
		d.failed = err
		return
	}
	if missing != nil {
		d.log.Error("failed to open a stream; the others are used without it until the next start", "disk", d.dir, "error", missing)
	}
	d.accept()
	d.log.Info("the streams take writes again", "disk", d.dir)
}

// keepReserve creates the reserve's file if it does not exist.
func (d *Disk) keepReserve() error {
	if s, err := os.Stat(d.reserve); err == nil && s.Size() == reserveBytes {
		d.mu.Lock()
		d.attempts = 0 // with this much room, the next failure is a new fault
		d.mu.Unlock()
		return nil
	}
	f, err := os.OpenFile(d.reserve, os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err = unix.Fallocate(int(f.Fd()), 0, 0, reserveBytes); errors.Is(err, unix.EOPNOTSUPP) {
		_, err = f.Write(make([]byte, reserveBytes))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(d.reserve))
	}
	return nil
}

// room returns an error if the streams take no writes, or if a write would leave too little of the
// disk free. size is the number of bytes to write, and keep is the number of bytes that must stay
// free.
func (d *Disk) room(size, keep int64) error {
	if err := d.fault(); err != nil || d.cluster != nil {
		return err
	}
	return disk.Room(d.dir, size+keep)
}

// fault returns why the streams take no writes, or nil.
func (d *Disk) fault() error {
	d.mu.Lock()
	failed := d.failed
	d.mu.Unlock()
	if failed == nil {
		return nil
	}
	if d.cluster != nil {
		return fmt.Errorf("%s takes no writes now; try again: %w: %w", d.cluster, ErrStopped, failed)
	}
	if noSpace(failed) {
		free, err := disk.Free(d.dir)
		if err != nil {
			free = -1
		}
		return &disk.FullError{Path: d.dir, Free: free, Want: changeRoom, Err: failed}
	}
	return fmt.Errorf("the streams in %s take no writes, and will be opened again: %w: %w", d.dir, ErrStopped, failed)
}

// serverError is an error of the server. The server reports the text of a failed write, but not its
// error number. So Is compares texts.
type serverError struct{ error }

// Unwrap returns the server's error.
func (e serverError) Unwrap() error { return e.error }

// Is reports whether target is an error number whose text the server's text has.
func (e serverError) Is(target error) bool {
	number, ok := target.(unix.Errno)
	return ok && strings.Contains(e.Error(), number.Error())
}

// noSpace reports whether the server failed to write because a disk is full.
func noSpace(err error) bool { return errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) }

// Degraded returns why async requests, and perhaps deploys, are refused. It returns nil if nothing
// is refused.
func (d *Disk) Degraded() error { return d.room(0, acceptRoom) }

// DiskStats is the state of a [Disk].
type DiskStats struct {
	Free     int64  // free bytes on the disk; -1: unknown
	Stopped  bool   // the streams take no writes
	Low      bool   // the disk has too little room for async requests
	Reopened uint64 // how often the streams were opened again
}

// Stats returns the state of the disk. It reads the free bytes each time.
func (d *Disk) Stats() DiskStats {
	free := int64(-1)
	if d.cluster == nil {
		if n, err := disk.Free(d.dir); err == nil {
			free = n
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.cluster != nil {
		return DiskStats{Free: free, Stopped: d.failed != nil, Reopened: d.reopened}
	}
	return DiskStats{Free: free, Stopped: d.failed != nil, Low: free < acceptRoom, Reopened: d.reopened}
}

// prepareDeletion prepares a deletion. If the disk is full, it removes the reserve and waits until
// the streams take writes. If there is still no room, it fails at once.
func (d *Disk) prepareDeletion(ctx context.Context) error {
	if d.cluster != nil {
		return d.fault()
	}
	free, err := disk.Free(d.dir)
	if err == nil && free < deletionRoom && os.Remove(d.reserve) == nil {
		d.log.Warn("the disk is full: a deletion uses the reserved room", "disk", d.dir, "bytes", int64(reserveBytes))
		free += reserveBytes
	}
	d.mu.Lock()
	failed, opened := d.failed, d.opened
	d.deleting = d.deleting || failed != nil
	d.mu.Unlock()
	switch {
	case failed == nil:
		return nil
	case err != nil || free < deletionRoom:
		return d.fault()
	}
	select {
	case d.wake <- struct{}{}:
	default: // the goroutine is awake already
	}
	select {
	case <-opened:
		return nil
	case <-ctx.Done():
		return d.fault()
	}
}

// writing runs f, which writes to a stream. The context of f ends when the streams stop taking
// writes.
func (d *Disk) writing(ctx context.Context, f func(context.Context) error) error {
	stopped := d.stops()
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() {
		select {
		case <-stopped:
			cancel()
		case <-ctx.Done():
		}
	})
	err := f(ctx)
	cancel()
	wg.Wait()
	if err = d.explain(err); err == nil {
		return nil
	}
	select {
	case <-stopped:
		if fault := d.fault(); fault != nil {
			return fault
		}
	default:
	}
	return err
}

// copies returns how many servers keep a stream, which are at least as many as do so now: a stream
// must not lose a copy because a server is away. From now on, the stream is checked.
func (d *Disk) copies(ctx context.Context, js jetstream.JetStream, stream string) (int, error) {
	if d.cluster == nil {
		return 1, nil
	}
	have, err := replicasOf(ctx, js, stream)
	d.cluster.follow(stream)
	return max(have, d.replicas), err
}

// explain adds to the error of a write that the cluster takes none now. It returns other errors
// unchanged, and all errors of the embedded server.
func (d *Disk) explain(err error) error {
	if err == nil || d.cluster == nil || !d.cluster.refuses(err) {
		return err
	}
	d.report(err)
	return fmt.Errorf("%s refused a write: %w: %w", d.cluster, ErrStopped, err)
}

// late explains the error of a write that the cluster has not answered.
func (d *Disk) late(err error) error {
	if d.cluster == nil || errors.Is(err, ErrStopped) {
		return err
	}
	d.report(err)
	return fmt.Errorf("%s has not answered: %w: %w", d.cluster, ErrStopped, err)
}

// stops returns a channel that is closed while the streams take no writes. Ask for it before a
// write.
func (d *Disk) stops() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.wrote = time.Now()
	return d.stopped
}

// opens returns a channel that is closed when the streams are opened again. After that, a bucket
// must be watched again.
func (d *Disk) opens() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.opened
}
