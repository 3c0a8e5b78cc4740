package builder

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// wheels is the cache of the packages that earlier builds of this user have installed. Builds use
// it while the index cannot be reached. Only builds that ask the same indexes share wheels, so a
// package of one index never replaces a package of another index.
type wheels struct {
	folder string // wheels of this build's indexes, below all
	all    string // wheels of all indexes
}

// wheelBytes bounds the total size of all kept wheels. The least recently used wheels are removed
// first.
const wheelBytes = 8 << 30

// partPrefix begins the names of folders with wheels that are not yet kept. A folder that is older
// than partAge was left by a build that was killed.
const (
	partPrefix = ".new-"
	partAge    = 24 * time.Hour
)

// keptWheels returns the kept wheels of the indexes that a requirements.txt asks. It returns nil if
// no wheels can be kept, for example because this user has no cache folder, or because the file
// names packages by paths or URLs. Such a package may change while its version stays.
func (p *python) keptWheels(ctx context.Context, handler, requirements string) (*wheels, error) {
	cache, err := os.UserCacheDir()
	if err != nil {
		return nil, nil // without a home folder, no wheels are kept
	}
	var options []string // lines of the file that name indexes
	for line := range strings.Lines(requirements) {
		line, _, _ = strings.Cut(strings.TrimSpace(line), " #")
		switch {
		case line == "" || line[0] == '#':
		case strings.HasPrefix(line, "--index-url") || strings.HasPrefix(line, "--extra-index-url") || strings.HasPrefix(line, "-i "):
			options = append(options, line)
		case line[0] == '-' && !strings.HasPrefix(line, "--hash") || strings.ContainsAny(line, "/@"):
			return nil, nil
		}
	}
	cmd := p.cmd(ctx, "-m", "pip", "config", "list", "--disable-pip-version-check")
	cmd.Dir = handler
	said, err := cmd.Output()
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case err != nil && strings.Contains(stderrOf(err), "No module named pip"):
		return nil, p.noPip()
	case err != nil: // the version of pip is too old
		return nil, nil
	}
	key := sha256.Sum256(fmt.Appendf(nil, "%q %q", said, options))
	all := filepath.Join(cache, "stagecoach", "wheels")
	w := &wheels{all: all, folder: filepath.Join(all, hex.EncodeToString(key[:8]))}
	err = os.MkdirAll(w.folder, 0o700) // packages of a private index must stay private
	if err == nil {
		err = errors.Join(checkOwner(w.all), checkOwner(w.folder))
	}
	if err != nil {
		fmt.Fprintf(p.output(), "build: packages are not kept for the next build: %v\n", err)
		return nil, nil
	}
	return w, nil
}

// checkOwner returns an error unless a folder belongs to this user and no other user can write to
// it, because a build installs wheels from the folder. With sudo, or with a cache that users share,
// the folder may belong to another user.
func checkOwner(folder string) error {
	info, err := os.Lstat(folder)
	if err != nil {
		return err
	}
	owner, mode := info.Sys().(*syscall.Stat_t).Uid, info.Mode()
	if !info.IsDir() || int(owner) != os.Geteuid() || mode.Perm()&0o022 != 0 {
		return fmt.Errorf("%s: got mode %v of user %d, want a folder that only this user, %d, can write to; remove it, or set XDG_CACHE_HOME to another", folder, mode, owner, os.Geteuid())
	}
	return nil
}

// add keeps wheels, and marks those that are kept already as used now.
func (w *wheels) add(c chosen) error {
	now := time.Now()
	for _, x := range c.wheels {
		file, to := filepath.Join(c.folder, x.File), filepath.Join(w.folder, x.File)
		is, err := os.Stat(file)
		if err != nil {
			return err
		}
		if was, err := os.Stat(to); err != nil || !os.SameFile(was, is) {
			if err := w.link(file, to); err != nil {
				return err
			}
		}
		if err := os.Chtimes(to, now, now); err != nil {
			return err
		}
	}
	return errors.Join(w.shrink(wheelBytes), w.forget())
}

// link makes a hard link to a file, or a copy if the file is on another disk. It does so
// atomically, because other builds may run at the same time.
func (w *wheels) link(file, to string) error {
	tmp, err := os.MkdirTemp(w.folder, partPrefix)
	if err != nil {
		return err
	}
	part := filepath.Join(tmp, "wheel")
	if err = linkFile(file, part); err == nil {
		err = os.Rename(part, to)
	}
	return errors.Join(err, os.RemoveAll(tmp))
}

// shrink removes the least recently used wheels until the others fit into the given number of
// bytes. It also removes the folders that killed builds have left.
func (w *wheels) shrink(most int64) error {
	type wheel struct {
		file string
		size int64
		used time.Time
	}
	var all []wheel
	var bytes int64
	parts, err := filepath.Glob(filepath.Join(w.all, "*", partPrefix+"*"))
	if err != nil {
		return err
	}
	for _, part := range parts {
		if info, err := os.Stat(part); err == nil && time.Since(info.ModTime()) > partAge {
			if err := os.RemoveAll(part); err != nil {
				return err
			}
		}
	}
	files, err := filepath.Glob(filepath.Join(w.all, "*", "*.whl"))
	if err != nil {
		return err
	}
	for _, file := range files {
		info, err := os.Stat(file)
		if err != nil {
			continue // another build has removed it
		}
		all = append(all, wheel{file, info.Size(), info.ModTime()})
		bytes += info.Size()
	}
	slices.SortFunc(all, func(a, b wheel) int { return cmp.Or(a.used.Compare(b.used), cmp.Compare(a.file, b.file)) })
	for _, x := range all {
		if bytes <= most {
			break
		}
		if err := remove(x.file); err != nil {
			return err
		}
		bytes -= x.size
	}
	return nil
}
