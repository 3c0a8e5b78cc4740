package keysmanager

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"log/slog"
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

// packedFolders is the folder for what zygotes make of models, kept across restarts: one folder per
// image and model. Its methods are safe for concurrent use. It has no lock: the file system is its
// state.
type packedFolders struct {
	folder string // empty: nothing is kept
	log    *slog.Logger
	// unlessUsed calls take unless somebody uses what is in the folder of this name. Nobody begins
	// to use it meanwhile.
	unlessUsed func(name string, take func())
}

// prepacked returns the folder for what zygotes make of an image's model, such as its pre-packed
// parameters; empty if nothing can be kept.
func (d *packedFolders) prepacked(key zygote.Key) string {
	if d.folder == "" {
		return ""
	}
	folder, err := filepath.Abs(filepath.Join(d.folder, folderOf(key)))
	if err == nil {
		err = os.MkdirAll(folder, 0o700)
	}
	if err != nil {
		d.log.Warn("what zygotes make of a model is not kept", "error", err)
		return ""
	}
	now := time.Now()
	_ = os.Chtimes(folder, now, now) // the order in which folders go; of a used one it does not matter
	d.trim()
	return folder
}

// diskFree is the share of a disk that pre-packed parameters leave free, if they can: those that
// nobody uses go until it is.
const diskFree = 0.10

// removed begins the name of a folder of parameters that is being removed.
const removed = ".removed-"

// trim removes the pre-packed parameters that no function uses, least recently used first, while
// the disk is nearly full.
func (d *packedFolders) trim() {
	for _, folder := range d.packed() {
		if full, err := nearlyFull(d.folder); err != nil || !full {
			return
		}
		if gone := d.takeAway(folder); gone != "" {
			if err := os.RemoveAll(gone); err != nil {
				d.log.Warn("pre-packed parameters that nobody uses stay", "error", err)
				return
			}
			d.log.Info("pre-packed parameters removed: the disk is nearly full", "folder", folder)
		}
	}
}

// sweepHalfPacked removes what the loads of an earlier daemon have left half packed, once they have
// ended.
func (d *packedFolders) sweepHalfPacked(loading []<-chan struct{}) {
	timeout := time.After(endTimeout)
	for _, gone := range loading {
		select {
		case <-gone:
		case <-timeout:
			return // the next daemon does it
		}
	}
	for _, digest := range d.packed() {
		d.removeHalfPacked(filepath.Join(d.folder, digest), 0)
	}
}

// removeHalfPacked removes, from a folder of an image's parameters, what a process has left half
// packed that was killed, or 0: all of them have. Its name ends with the number of the process, or
// of its user.
func (d *packedFolders) removeHalfPacked(folder string, pid int) {
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
			d.log.Warn("half packed parameters stay", "error", err)
		}
	}
}

// packed returns the names of the folders with parameters, least recently used first; what an
// earlier removal has left comes first.
func (d *packedFolders) packed() []string {
	entries, err := os.ReadDir(d.folder)
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
func (d *packedFolders) takeAway(name string) (moved string) {
	path := filepath.Join(d.folder, name)
	if strings.HasPrefix(name, removed) {
		return path
	}
	d.unlessUsed(name, func() {
		gone := filepath.Join(d.folder, removed+name)
		if os.Rename(path, gone) == nil {
			moved = gone
		}
	})
	return moved
}

func nearlyFull(folder string) (bool, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(folder, &s); err != nil {
		return false, err
	}
	return float64(s.Bavail) < diskFree*float64(s.Blocks), nil
}
