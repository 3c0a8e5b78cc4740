package keysmanager

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// folderOf returns the name of the folder for what zygotes make of an image's model. An image may
// have several models, also of one name in its folders. What the author's code makes depends on the
// interpreter and the environment, too.
func folderOf(k zygote.Key) string {
	of := filepath.Clean(k.Model)
	if engineByKey(k).author {
		of += "\x00" + k.Process + "\x00" + k.Environment
	}
	sum := sha256.Sum256([]byte(of))
	return k.Digest + "-" + hex.EncodeToString(sum[:8])
}

// prepacked returns the folder for what zygotes make of an image's model, such as its pre-packed
// parameters; empty when nothing can be kept.
func (m *Manager) prepacked(key zygote.Key) string {
	if m.cfg.Cache == "" {
		return ""
	}
	folder, err := filepath.Abs(filepath.Join(m.cfg.Cache, folderOf(key)))
	if err == nil {
		err = os.MkdirAll(folder, 0o700)
	}
	if err != nil {
		m.cfg.Log.Warn("what zygotes make of a model is not kept", "error", err)
		return ""
	}
	now := time.Now()
	_ = os.Chtimes(folder, now, now) // the order in which folders go; of a used one it does not matter
	m.trim()
	return folder
}

// diskFree is the share of a disk that pre-packed parameters leave free, if they can: those that
// nobody uses go until it is.
const diskFree = 0.10

// removed begins the name of a folder of parameters that is being removed.
const removed = ".removed-"

// trim removes the pre-packed parameters that no function uses, least recently used first, while
// the disk is nearly full.
func (m *Manager) trim() {
	for _, folder := range m.packed() {
		if full, err := nearlyFull(m.cfg.Cache); err != nil || !full {
			return
		}
		if gone := m.takeAway(folder); gone != "" {
			if err := os.RemoveAll(gone); err != nil {
				m.cfg.Log.Warn("pre-packed parameters that nobody uses stay", "error", err)
				return
			}
			m.cfg.Log.Info("pre-packed parameters removed: the disk is nearly full", "folder", folder)
		}
	}
}

// sweepHalfPacked removes what the loads of an earlier daemon have left half packed, once they have
// ended.
func (m *Manager) sweepHalfPacked(loading []<-chan struct{}) {
	timeout := time.After(endTimeout)
	for _, gone := range loading {
		select {
		case <-gone:
		case <-timeout:
			return // the next daemon does it
		}
	}
	for _, digest := range m.packed() {
		m.removeHalfPacked(filepath.Join(m.cfg.Cache, digest), 0)
	}
}

// removeHalfPacked removes, from a folder of an image's parameters, what a process has left half
// packed that was killed, or 0: all of them have. Its name ends with the number of the process, or
// of its user.
func (m *Manager) removeHalfPacked(folder string, pid int) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return // there is none
	}
	for _, e := range entries {
		n, err := strconv.Atoi(strings.TrimPrefix(filepath.Ext(e.Name()), "."))
		if err != nil || pid != 0 && n != pid {
			continue
		}
		if err := os.RemoveAll(filepath.Join(folder, e.Name())); err != nil {
			m.cfg.Log.Warn("half packed parameters stay", "error", err)
		}
	}
}

// packed returns the names of the folders with parameters, least recently used first; what an
// earlier removal has left comes first.
func (m *Manager) packed() []string {
	entries, err := os.ReadDir(m.cfg.Cache)
	if err != nil {
		return nil // it is not there yet
	}
	at := map[string]time.Time{}
	var names []string
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !e.IsDir() {
			continue
		}
		names = append(names, e.Name())
		if !strings.HasPrefix(e.Name(), removed) {
			at[e.Name()] = info.ModTime()
		}
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(at[a].Compare(at[b]), cmp.Compare(a, b)) })
	return names
}

// takeAway gives a folder a name by which nobody finds it, and returns its path; empty: it is used.
func (m *Manager) takeAway(name string) (path string) {
	path = filepath.Join(m.cfg.Cache, name)
	if strings.HasPrefix(name, removed) {
		return path
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range m.uses {
		if folderOf(k) == name {
			return ""
		}
	}
	for _, k := range m.slots.Keys() {
		if folderOf(k) == name {
			return ""
		}
	}
	gone := filepath.Join(m.cfg.Cache, removed+name)
	if os.Rename(path, gone) != nil {
		return ""
	}
	return gone
}

func nearlyFull(folder string) (bool, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(folder, &s); err != nil {
		return false, err
	}
	return float64(s.Bavail) < diskFree*float64(s.Blocks), nil
}
