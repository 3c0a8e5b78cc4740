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

// folderOf returns the name of the folder for the files that zygotes make from an image's model.
// The name contains a hash of the model's full path, because an image may have models of the same
// name in several folders. If the zygote runs the author's code, its files also depend on the
// interpreter and the environment, so the hash covers them, too.
func folderOf(k zygote.Key) string {
	of := filepath.Clean(k.Model)
	if engineByKey(k).author {
		of += "\x00" + k.Process + "\x00" + k.Environment
	}
	sum := sha256.Sum256([]byte(of))
	return k.Digest + "-" + hex.EncodeToString(sum[:8])
}

// packedFolders manages the files that zygotes make from models, such as pre-packed parameters.
// There is one folder per image and model, which is kept across restarts. Its methods are safe for
// concurrent use. They need no lock, because the only state is in the file system.
type packedFolders struct {
	folder string // empty: nothing is kept
	log    *slog.Logger
	// unlessUsed calls take unless a function or a zygote uses the folder of this name. Nobody can
	// begin to use it during the call.
	unlessUsed func(name string, take func())
}

// prepacked returns the folder for the files that zygotes make of an image's model. It returns ""
// if nothing can be kept.
func (d *packedFolders) prepacked(key zygote.Key) string {
	if d.folder == "" {
		return ""
	}
	folder, err := filepath.Abs(filepath.Join(d.folder, folderOf(key)))
	if err == nil {
		err = os.MkdirAll(folder, 0o700)
	}
	if err != nil {
		d.log.Warn("files that zygotes make of a model are not kept", "error", err)
		return ""
	}
	now := time.Now()
	_ = os.Chtimes(folder, now, now) // trim removes the oldest folders first
	d.trim()
	return folder
}

// diskFree is the share of a disk that trim keeps free: trim removes unused pre-packed parameters
// until that share is free.
const diskFree = 0.10

// removed is the prefix of the name of a folder that is being removed.
const removed = ".removed-"

// trim removes pre-packed parameters that no function uses, least recently used first, while the
// disk is nearly full.
func (d *packedFolders) trim() {
	for _, folder := range d.packed() {
		if full, err := nearlyFull(d.folder); err != nil || !full {
			return
		}
		if gone := d.takeAway(folder); gone != "" {
			if err := os.RemoveAll(gone); err != nil {
				d.log.Warn("unused pre-packed parameters are not removed", "error", err)
				return
			}
			d.log.Info("pre-packed parameters removed: the disk is nearly full", "folder", folder)
		}
	}
}

// sweepHalfPacked removes the half-packed files of an earlier daemon's loads, once these loads have
// ended.
func (d *packedFolders) sweepHalfPacked(loading []<-chan struct{}) {
	timeout := time.After(endTimeout)
	for _, gone := range loading {
		select {
		case <-gone:
		case <-timeout:
			return // the next daemon removes them
		}
	}
	for _, digest := range d.packed() {
		d.removeHalfPacked(filepath.Join(d.folder, digest), 0)
	}
}

// removeHalfPacked removes files that a process has not finished packing from the folder of a
// model. The name of such a file ends in "." and the pid or uid of the process. pid selects the
// files of one killed process; 0 means the files of all processes.
func (d *packedFolders) removeHalfPacked(folder string, pid int) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return // the folder does not exist
	}
	for _, e := range entries {
		n, err := strconv.Atoi(strings.TrimPrefix(filepath.Ext(e.Name()), "."))
		if err != nil || pid != 0 && n != pid {
			continue
		}
		if err := os.RemoveAll(filepath.Join(folder, e.Name())); err != nil {
			d.log.Warn("half-packed parameters are not removed", "error", err)
		}
	}
}

// packed returns the names of the folders with parameters, least recently used first. Before all of
// these are the folders whose removal was interrupted.
func (d *packedFolders) packed() []string {
	entries, err := os.ReadDir(d.folder)
	if err != nil {
		return nil // the folder does not exist yet
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

// takeAway renames a folder so that nobody finds it, and returns its new path. It returns "" if the
// folder is used.
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
