package warden

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// store is a warden without a connection.
type store struct {
	runtime   sandbox.Runtime
	waits     sync.WaitGroup // one per process
	reporting sync.Mutex     // held while onExit is called, and while it is replaced

	mu      sync.Mutex
	closed  bool
	entries map[string]*entry
	onExit  func(Exit)    // nil: no manager
	changed chan struct{} // has one element if processes have ended since the last read
}

// entry is what a warden keeps under a name.
type entry struct {
	name  string
	meta  []byte
	files []*os.File
	drain drain

	process sandbox.Process // nil: no process, or it is not started yet
	starts  bool            // the process is being started
	idle    bool
	ended   bool
	status  unix.WaitStatus
}

func newStore(r sandbox.Runtime) *store {
	return &store{runtime: r, entries: map[string]*entry{}, changed: make(chan struct{}, 1)}
}

func (s *store) attach(onExit func(Exit)) ([]Kept, error) {
	s.reporting.Lock()
	defer s.reporting.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return nil, ErrClosed
	case s.onExit != nil:
		return nil, errManaged
	}
	var out []Kept
	for _, e := range s.entries {
		files, err := duplicates(e.files)
		if err != nil {
			closeAll(out)
			return nil, fmt.Errorf("warden: entry %q: %w", e.name, err)
		}
		out = append(out, Kept{Name: e.name, Meta: e.meta, Files: files, PID: e.pid(), Ended: e.ended, Status: e.status})
	}
	for i := range out {
		e := s.entries[out[i].Name]
		e.drain.stop()
		out[i].Lost, e.drain.lost = e.drain.lost, 0
	}
	s.onExit = onExit
	slices.SortFunc(out, func(a, b Kept) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

// errManaged means that the warden already has a manager.
var errManaged = errors.New("warden: it has a manager already, want one at a time")

func closeAll(all []Kept) {
	for _, k := range all {
		for _, f := range k.Files {
			_ = f.Close() // nothing was written through it
		}
	}
}

func (s *store) release() error {
	s.reporting.Lock()
	defer s.reporting.Unlock()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onExit = nil
	for _, e := range s.entries {
		e.drain.start(e.files)
	}
	return nil
}

func (s *store) start(ctx context.Context, p Process) (int, error) {
	if err := check(p.Name, p.Meta, p.Keep); err != nil {
		return 0, err
	}
	files, err := duplicates(p.Keep)
	if err != nil {
		return 0, fmt.Errorf("warden: entry %q: %w", p.Name, err)
	}
	e := &entry{name: p.Name, meta: slices.Clone(p.Meta), files: files, idle: p.Idle, starts: true}
	s.mu.Lock()
	_, taken := s.entries[p.Name]
	if !taken && !s.closed {
		s.entries[p.Name] = e
		s.waits.Add(1)
	}
	closed := s.closed
	s.mu.Unlock()
	if closed || taken {
		e.forget()
		if closed {
			return 0, ErrClosed
		}
		return 0, fmt.Errorf("warden: process %q: %w", p.Name, ErrTaken)
	}
	process, err := s.runtime.Start(ctx, p.Command)
	s.mu.Lock()
	defer s.mu.Unlock()
	e.starts = false
	if err != nil {
		delete(s.entries, p.Name)
		e.forget()
		s.waits.Done()
		return 0, err
	}
	e.process = process
	if s.onExit == nil {
		e.drain.start(e.files)
	}
	if s.closed {
		_ = process.Signal(syscall.SIGKILL)
	}
	go s.wait(e) // ends with the process; close waits for it
	return process.PID(), nil
}

// wait records the end of a process.
func (s *store) wait(e *entry) {
	defer s.waits.Done()
	status := e.process.Wait()
	s.reporting.Lock()
	defer s.reporting.Unlock()
	s.mu.Lock()
	e.ended, e.status = true, status
	tell := s.onExit
	s.mu.Unlock()
	select {
	case s.changed <- struct{}{}:
	default:
	}
	if tell != nil {
		tell(Exit{Name: e.name, PID: e.process.PID(), Status: status})
	}
}

func (s *store) signal(name string, sig syscall.Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[name]
	if e == nil || e.process == nil {
		return fmt.Errorf("warden: signal to %q: %w", name, ErrUnknown)
	}
	if !e.ended {
		_ = e.process.Signal(sig) // fails if it has just ended
	}
	return nil
}

func (s *store) put(name string, meta []byte, files []*os.File) error {
	if err := check(name, meta, files); err != nil {
		return err
	}
	ours, err := duplicates(files)
	if err != nil {
		return fmt.Errorf("warden: entry %q: %w", name, err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[name]
	switch {
	case s.closed:
		(&entry{files: ours}).forget()
		return ErrClosed
	case e == nil:
		e = &entry{name: name}
		s.entries[name] = e
	}
	e.meta = slices.Clone(meta)
	if len(files) > 0 {
		e.forget()
		e.files = ours
	}
	if s.onExit == nil {
		e.drain.start(e.files)
	}
	return nil
}

func (s *store) drop(name string) error {
	e, err := s.remove(name)
	if err == nil && e != nil && e.process != nil {
		e.process.Forget()
	}
	return err
}

// remove removes an entry whose process has ended, and returns it; nil: there is none of this name.
func (s *store) remove(name string) (*entry, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[name]
	switch {
	case e == nil:
		return nil, nil
	case e.runs():
		return nil, fmt.Errorf("warden: drop %q: its process still runs; end it first", name)
	}
	delete(s.entries, name)
	e.forget()
	return e, nil
}

// forget closes the descriptors of an entry.
func (e *entry) forget() {
	e.drain.stop()
	for _, f := range e.files {
		_ = f.Close() // nothing was written through it
	}
	e.files = nil
}

// close ends all processes and drops all entries.
func (s *store) close() {
	s.mu.Lock()
	s.closed = true
	for _, e := range s.entries {
		if e.process != nil && !e.ended {
			_ = e.process.Signal(syscall.SIGKILL)
		}
	}
	s.mu.Unlock()
	s.waits.Wait()
	s.mu.Lock()
	entries := s.entries
	s.entries = nil
	s.mu.Unlock()
	for _, e := range entries {
		e.forget()
		if e.process != nil {
			e.process.Forget()
		}
	}
	s.runtime.Close()
}

// count returns how many processes run, and how many entries there are.
func (s *store) count() (running, entries int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.entries {
		if e.runs() {
			running++
		}
	}
	return running, len(s.entries)
}

// endIdle ends idle processes if there is no manager, and returns their names.
func (s *store) endIdle() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var idle []*entry
	for _, e := range s.entries {
		if s.onExit == nil && e.idle && e.runs() && e.process != nil {
			idle = append(idle, e)
		}
	}
	if len(idle) == 0 {
		return nil
	}
	busy, err := parents()
	if err != nil {
		return nil // without the list, no process is known to be idle
	}
	for _, e := range idle {
		if !busy[e.pid()] {
			_ = e.process.Signal(syscall.SIGKILL) // fails if it has just ended
			names = append(names, e.name)
		}
	}
	return names
}

// runs reports whether the entry has a process that runs or is being started.
func (e *entry) runs() bool { return e.starts || e.process != nil && !e.ended }

func (e *entry) pid() int {
	if e.process == nil {
		return 0
	}
	return e.process.PID()
}

// check returns an error if an entry would be larger than the limits.
func check(name string, meta []byte, files []*os.File) error {
	switch {
	case name == "" || len(name) > maxName:
		return fmt.Errorf("warden: a name of %d bytes, want 1..%d", len(name), maxName)
	case len(meta) > MaxMeta:
		return fmt.Errorf("warden: entry %q: a description of %d bytes, want at most %d", name, len(meta), MaxMeta)
	case len(files) > MaxFiles:
		return fmt.Errorf("warden: entry %q: %d descriptors, want at most %d", name, len(files), MaxFiles)
	}
	return nil
}

// maxName is the maximum length of a name, in bytes.
const maxName = 512

// duplicates returns copies of descriptors.
func duplicates(files []*os.File) ([]*os.File, error) {
	var out []*os.File
	for _, f := range files {
		d, err := duplicate(f)
		if err != nil {
			for _, o := range out {
				_ = o.Close()
			}
			return nil, err
		}
		out = append(out, d)
	}
	return out, nil
}

func duplicate(f *os.File) (*os.File, error) {
	raw, err := f.SyscallConn() // Fd would make the file a blocking one
	if err != nil {
		return nil, err
	}
	fd, failed := -1, error(nil)
	if err := raw.Control(func(from uintptr) { fd, failed = unix.FcntlInt(from, unix.F_DUPFD_CLOEXEC, 3) }); err != nil {
		return nil, err
	}
	if failed != nil {
		return nil, failed
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// drain reads pipes and drops the output.
type drain struct {
	pipes   []*os.File
	readers sync.WaitGroup
	mu      sync.Mutex
	lost    int64 // bytes; guarded by mu while readers run
}

// Limits of reading the pipes. A process that prints all the time must not cost a core, as in
// sandbox.Output. A thousand pipes without output take 16 MB.
const (
	drainBytes = 8 << 10
	drainPause = time.Millisecond
)

// start starts reading those of the files that are pipes.
func (d *drain) start(files []*os.File) {
	d.stop()
	for _, f := range files {
		info, err := f.Stat()
		// A pipe that cannot be polled is left alone.
		if err != nil || info.Mode()&os.ModeNamedPipe == 0 || f.SetReadDeadline(time.Time{}) != nil {
			continue
		}
		d.pipes = append(d.pipes, f)
		d.readers.Go(func() {
			for buf := make([]byte, drainBytes); ; time.Sleep(drainPause) {
				n, err := f.Read(buf)
				d.mu.Lock()
				d.lost += int64(n)
				d.mu.Unlock()
				if err != nil { // all writers have closed it, or stop was called
					return
				}
			}
		})
	}
}

// stop stops reading.
func (d *drain) stop() {
	for _, f := range d.pipes {
		_ = f.SetReadDeadline(time.Unix(1, 0))
	}
	d.readers.Wait()
	d.pipes = nil
}
