package node

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// ErrOldEpoch means that a node follows a control plane with a higher epoch.
var ErrOldEpoch = errors.New("node protocol: a newer control plane has taken over")

// fence remembers the highest epoch of all control planes that have spoken to a node. It is not
// safe for concurrent use.
type fence struct {
	file    string // empty: it is kept in memory only
	highest uint64
}

// openFence reads the epoch that an earlier daemon has stored.
func openFence(file string) (fence, error) {
	f := fence{file: file}
	if file == "" {
		return f, nil
	}
	b, err := os.ReadFile(file)
	if errors.Is(err, os.ErrNotExist) {
		return f, nil
	}
	if err == nil {
		f.highest, err = strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	}
	if err != nil {
		return f, fmt.Errorf("highest epoch in %s: %w", file, err)
	}
	return f, nil
}

// check returns an error if an epoch is lower than the highest one.
func (f *fence) check(epoch uint64) error {
	if epoch < f.highest {
		return fmt.Errorf("%w: the epoch of this one is %d, and the node has seen epoch %d", ErrOldEpoch, epoch, f.highest)
	}
	return nil
}

// raise makes an epoch the highest one and stores it. If it cannot be stored, only the memory has
// it, and the error says why.
func (f *fence) raise(epoch uint64) error {
	f.highest = epoch
	if f.file == "" {
		return nil
	}
	return disk.Replace(f.file, append(strconv.AppendUint(nil, epoch, 10), '\n'))
}

// admit returns an error if a control plane with a higher epoch has spoken to this node. If epoch
// is a new highest one, what an earlier control plane has under way is undone.
func admit(s *Server, epoch uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.fence.check(epoch); err != nil || epoch == s.fence.highest {
		return err
	}
	if s.fence.highest > 0 {
		s.cfg.Log.Info("another control plane has taken over", "node", s.cfg.Me.Name, "epoch", epoch, "before", s.fence.highest)
	}
	if err := s.fence.raise(epoch); err != nil {
		s.cfg.Log.Error("failed to store the epoch of the control plane; a restart of this daemon forgets it", "file", s.fence.file, "error", err)
	}
	for _, t := range s.running {
		if t.epoch < epoch {
			t.givenUp = true
			t.cancel(ErrOldEpoch)
		}
	}
	for _, k := range s.kept {
		if k.epoch < epoch {
			s.dropKept(k)
		}
	}
	return nil
}

// epochFunc returns the epoch of this control plane, or an error while it may not act. nil: 0.
type epochFunc func() (uint64, error)

func (f epochFunc) now() (uint64, error) {
	if f == nil {
		return 0, nil
	}
	return f()
}
