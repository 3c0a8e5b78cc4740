package items

import (
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"github.com/cespare/xxhash/v2"
	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Config configures a Store.
type Config struct {
	Node  string
	Limit int64 // bytes; 0: nothing is kept
	Log   *slog.Logger
}

// Bounds of a Store.
const (
	// functionShare divides the limit: the items of one function may have that part of it.
	functionShare = 2
	// grace is how long items stay after the deadline of their request. Normally, the end of the
	// request is announced before that.
	grace = 30 * time.Second
	// longest is how long items stay if their request has no deadline.
	longest    = 10 * time.Minute
	sweepEvery = 5 * time.Second
)

// Errors of a Store.
var (
	ErrFull = errors.New("items: no room")
	ErrGone = errors.New("the node does not have it: its request has ended, or the daemon was restarted")
)

// Store has the items that a node keeps, in memory. Its methods are safe for concurrent use.
type Store struct {
	cfg  Config
	stop chan struct{}
	done sync.WaitGroup

	mu        sync.Mutex
	closed    bool
	items     map[string]*item            // by blob
	owners    map[string]map[string]*item // by owner, then by blob
	functions map[string]int64            // bytes of items, by function
	stats     Stats
}

// item is an entry of a Store.
type item struct {
	ref      tensor.Ref
	function string
	file     *os.File // sealed
	until    time.Time
	readers  int
	gone     bool // it was removed; the last reader closes the file
}

// Stats counts a Store's items.
type Stats struct {
	Items       int   // items that the Store has now
	Bytes       int64 // bytes of these, and of removed items that are still being read
	Kept        uint64
	Full        uint64 // outputs that the Store had no room for
	Expired     uint64 // items that were removed because their time was over
	Sent        uint64 // bytes that were sent to other processes
	Refused     uint64 // requests of other processes that were refused
	lastRefusal time.Time
}

// NewStore returns an empty Store. The caller closes it.
func NewStore(cfg Config) *Store {
	s := &Store{
		cfg: cfg, stop: make(chan struct{}), items: map[string]*item{}, owners: map[string]map[string]*item{}, functions: map[string]int64{},
	}
	s.done.Go(func() {
		tick := time.NewTicker(sweepEvery)
		defer tick.Stop()
		for {
			select {
			case <-s.stop:
				return
			case now := <-tick.C:
				s.sweep(now)
			}
		}
	})
	return s
}

// Close removes all items. Those that are being read stay until their readers end.
func (s *Store) Close() {
	close(s.stop)
	s.done.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	for _, it := range s.items {
		s.remove(it)
	}
}

// Room returns how many bytes may be kept.
func (s *Store) Room() int64 { return s.cfg.Limit }

// Stats returns the current counts.
func (s *Store) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.stats
	out.Items = len(s.items)
	return out
}

// Keep copies the first size bytes of f, an encoded item. owner is the request that it belongs to,
// and function the one whose replica made it. The item stays until the owner is dropped, or until a
// while after deadline. The error is [ErrFull] if there is no room.
func (s *Store) Keep(owner wire.Owner, function string, f *os.File, size int64) (tensor.Ref, error) {
	if err := s.reserve(function, size); err != nil {
		return tensor.Ref{}, err
	}
	copied, sum, err := copyItem(f, size)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && s.closed {
		err = errors.Join(os.ErrClosed, copied.Close())
	}
	if err != nil {
		s.release(function, size)
		return tensor.Ref{}, fmt.Errorf("item of %d bytes: %w", size, err)
	}
	until := owner.Deadline.Add(grace)
	if owner.Deadline.IsZero() {
		until = time.Now().Add(longest)
	}
	it := &item{
		ref:      tensor.Ref{Owner: owner.Request, Blob: rand.Text(), Size: size, Keeper: tensor.Keeper{Node: s.cfg.Node, Sum: sum}},
		function: function, file: copied, until: until,
	}
	s.items[it.ref.Blob] = it
	if s.owners[owner.Request] == nil {
		s.owners[owner.Request] = map[string]*item{}
	}
	s.owners[owner.Request][it.ref.Blob] = it
	s.stats.Kept++
	return it.ref, nil
}

// reserve reserves room for an item of a function.
func (s *Store) reserve(function string, size int64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if size > s.cfg.Limit-s.stats.Bytes || size > s.cfg.Limit/functionShare-s.functions[function] {
		s.stats.Full++
		return fmt.Errorf("%w for %d bytes: %d of %d are in use, %d of them by %q, which may have half", ErrFull, size, s.stats.Bytes, s.cfg.Limit, s.functions[function], function)
	}
	s.stats.Bytes += size
	s.functions[function] += size
	return nil
}

// release gives room back. The caller holds s.mu.
func (s *Store) release(function string, size int64) {
	s.stats.Bytes -= size
	if s.functions[function] -= size; s.functions[function] <= 0 {
		delete(s.functions, function)
	}
}

// copyItem copies the beginning of a file into a sealed file in memory. The memory of the copy is
// counted for this process: that of the file itself is counted for the replica that has made it.
func copyItem(f *os.File, size int64) (*os.File, uint64, error) {
	// Reading anything else could block for ever.
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, 0, errors.Join(err, errors.New("want a regular file"))
	}
	to, err := wire.NewMemory()
	if err != nil {
		return nil, 0, err
	}
	sum := xxhash.New()
	p := buffers.Get().(*[]byte)
	defer buffers.Put(p)
	for at := int64(0); at < size && err == nil; {
		b := (*p)[:min(size-at, int64(len(*p)))]
		if _, err = f.ReadAt(b, at); err == nil {
			_, _ = sum.Write(b) // never fails
			_, err = to.Write(b)
		}
		at += int64(len(b))
	}
	if err == nil {
		err = wire.Seal(to)
	}
	if err != nil {
		return nil, 0, errors.Join(err, to.Close())
	}
	return to, sum.Sum64(), nil
}

// buffers is a pool of buffers for copies.
var buffers = sync.Pool{New: func() any { b := make([]byte, 256<<10); return &b }}

// Drop removes all items of requests that have ended.
func (s *Store) Drop(owners ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, owner := range owners {
		for _, it := range s.owners[owner] {
			s.remove(it)
		}
	}
}

// remove removes an item. The caller holds s.mu.
func (s *Store) remove(it *item) {
	delete(s.items, it.ref.Blob)
	all := s.owners[it.ref.Owner]
	if delete(all, it.ref.Blob); len(all) == 0 {
		delete(s.owners, it.ref.Owner)
	}
	it.gone = true
	s.settle(it)
}

// settle frees the memory of an item that was removed, unless the item is still being read. The
// caller holds s.mu.
func (s *Store) settle(it *item) {
	if it.gone && it.readers == 0 {
		_ = it.file.Close() // it is in memory
		s.release(it.function, it.ref.Size)
	}
}

// sweep removes items whose time is over.
func (s *Store) sweep(now time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, it := range s.items {
		if it.until.Before(now) {
			s.stats.Expired++
			s.remove(it)
		}
	}
}

// read returns an item for reading, until done is called.
func (s *Store) read(ref tensor.Ref) (it *item, done func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	it = s.items[ref.Blob]
	switch {
	case ref.Node != s.cfg.Node:
		err = fmt.Errorf("it is said to be with node %q, and this is node %q", ref.Node, s.cfg.Node)
	case it == nil || it.ref.Owner != ref.Owner:
		err = ErrGone
	case it.ref.Size != ref.Size || it.ref.Sum != ref.Sum:
		err = fmt.Errorf("it has %d bytes with the checksum %016x, want %d with %016x", it.ref.Size, it.ref.Sum, ref.Size, ref.Sum)
	}
	if err != nil {
		return nil, nil, err
	}
	it.readers++
	return it, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		it.readers--
		s.settle(it)
	}, nil
}

// Open returns an item of this node as a file for reading, without a copy. The caller closes the
// file.
func (s *Store) Open(ref tensor.Ref) (*os.File, error) {
	it, done, err := s.read(ref)
	if err != nil {
		return nil, err
	}
	defer done()
	fd, err := unix.FcntlInt(it.file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), "item"), nil
}
