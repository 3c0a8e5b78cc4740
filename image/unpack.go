package image

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"
)

// limits bounds the content of an image, because its figures come from outside and may be false.
type limits struct {
	entries int   // files, folders and links of all layers
	bytes   int64 // of all files, unpacked
}

var defaultLimits = limits{entries: 1_000_000, bytes: 128 << 30}

// Further limits: the length of a name in bytes, and the number of links on the way to a file.
const (
	maxName = 4096
	maxHops = 40
)

// unpacker unpacks the layers of an image into one folder, in order. Files keep their owners if
// this process may change owners. Set-user-ID and set-group-ID bits, extended attributes, devices
// and pipes are left out.
type unpacker struct {
	ctx    context.Context
	root   *os.Root
	shared string // folder with one copy of each big file, linked into all images that have it
	left   limits
	chown  bool
	folder map[string]tar.Header // headers of folders, which are applied at the end
	made   map[string]bool       // paths that this layer has made
	buffer []byte                // for the content of files
}

func newUnpacker(ctx context.Context, root *os.Root, shared string, l limits) *unpacker {
	return &unpacker{ctx: ctx, root: root, shared: shared, left: l, chown: os.Geteuid() == 0, folder: map[string]tar.Header{}}
}

// layer unpacks an archive and returns the digest of its bytes.
func (u *unpacker) layer(r io.Reader) (digest string, err error) {
	a := readAhead(u.limited(io.NopCloser(r)), aheadChunk)
	defer a.Close()
	digest, _, err = u.archive(a)
	return digest, err
}

// limited bounds an archive, including padding and bytes after its end. Apart from the content, it
// may have 2 KiB per entry for headers.
func (u *unpacker) limited(r io.ReadCloser) io.ReadCloser {
	return limited(r, u.left.bytes+int64(u.left.entries)*(2<<10))
}

// archive unpacks an archive and returns the digest of its bytes, and the digest of its headers and
// padding, as [layer.frame] gives it.
func (u *unpacker) archive(a *ahead) (digest, frame string, err error) {
	u.made = map[string]bool{}
	in := &tap{from: a, on: true, hash: sha256.New()}
	t := tar.NewReader(in)
	for {
		if err := u.ctx.Err(); err != nil {
			return "", "", err
		}
		e, err := t.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return "", "", fmt.Errorf("archive: %w", err)
		}
		if u.left.entries--; u.left.entries < 0 {
			return "", "", errTooMany
		}
		in.on = false // for the content
		if err := u.entry(e, source{content: t}); err != nil {
			return "", "", fmt.Errorf("entry %.200q: %w", e.Name, err)
		}
		in.on = true
	}
	if _, err := io.Copy(io.Discard, in); err != nil {
		return "", "", err
	}
	digest, _ = a.digest()
	return digest, sum(in.hash), nil
}

func sum(h hash.Hash) string { return "sha256:" + hex.EncodeToString(h.Sum(nil)) }

// local returns the name of an archive's entry without leading slashes and dots. An empty name is
// the root itself.
func local(name string) (string, error) {
	if len(name) > maxName || strings.ContainsRune(name, 0) {
		return "", fmt.Errorf("a name of %d bytes, want at most %d and no NUL", len(name), maxName)
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", errors.New("a name with .., want one inside the image")
		}
	}
	return strings.TrimPrefix(path.Clean("/"+name), "/"), nil
}

// source is where the content of a file comes from: an archive, or a file of a layer that the store
// has unpacked.
type source struct {
	content io.Reader
	file    string // empty: content
}

// tree adds a layer whose files the store has.
func (u *unpacker) tree(l *Layer) error {
	u.made = map[string]bool{}
	for _, e := range l.of.entries {
		if err := u.ctx.Err(); err != nil {
			return err
		}
		if u.left.entries--; u.left.entries < 0 {
			return errTooMany
		}
		if err := u.entry(&e.head, source{file: e.path}); err != nil {
			return fmt.Errorf("entry %.200q: %w", e.head.Name, err)
		}
	}
	return nil
}

var errTooMany = errors.New("more files than an image may have")

func (u *unpacker) entry(e *tar.Header, from source) error {
	name, err := local(e.Name)
	if err != nil {
		return err
	}
	switch {
	case e.Typeflag == tar.TypeXGlobalHeader:
		return nil
	case name == "" && e.Typeflag == tar.TypeDir:
		u.folder["."] = *e
		return nil
	case name == "":
		return errors.New("the entry for the root is not a folder")
	}
	dir, base := path.Split(name)
	if hidden, ok := strings.CutPrefix(base, ".wh."); ok {
		return u.whiteout(dir, hidden)
	}
	if dir, err = u.walk(dir, true); err != nil {
		return err
	}
	at := path.Join(dir, base)
	if info, err := u.root.Lstat(at); err == nil && (!info.IsDir() || e.Typeflag != tar.TypeDir) {
		if err := u.root.RemoveAll(at); err != nil {
			return err
		}
	}
	u.made[at] = true
	switch e.Typeflag {
	case tar.TypeDir:
		if err := u.root.Mkdir(at, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		u.folder[at] = *e
		return nil
	case tar.TypeReg, tar.TypeGNUSparse:
		return u.file(at, e, from)
	case tar.TypeSymlink:
		if len(e.Linkname) > maxName {
			return fmt.Errorf("a link of %d bytes, want at most %d", len(e.Linkname), maxName)
		}
		if err := u.root.Symlink(e.Linkname, at); err != nil {
			return err
		}
		return u.own(at, e)
	case tar.TypeLink:
		return u.link(at, e.Linkname)
	case tar.TypeChar, tar.TypeBlock, tar.TypeFifo:
		return nil
	}
	return fmt.Errorf("a thing of type %q, want files, folders and links", e.Typeflag)
}

// walk returns the folder that a path leads to, as a path without links. Links lead no further than
// the root, as when the image runs. If create is true, walk creates missing folders.
func (u *unpacker) walk(dir string, create bool) (string, error) {
	todo := strings.FieldsFunc(dir, func(r rune) bool { return r == '/' })
	at := "."
	for hops := 0; len(todo) > 0; {
		part := todo[0]
		todo = todo[1:]
		switch part {
		case ".":
			continue
		case "..": // in a link
			at = path.Dir(at)
			continue
		}
		next := path.Join(at, part)
		info, err := u.root.Lstat(next)
		switch {
		case errors.Is(err, fs.ErrNotExist) && create:
			if u.left.entries--; u.left.entries < 0 {
				return "", errors.New("more folders than an image may have")
			}
			if err := u.root.Mkdir(next, 0o755); err != nil {
				return "", err
			}
			u.made[next] = true
			at = next
		case err != nil:
			return "", err
		case info.IsDir():
			at = next
		case info.Mode()&fs.ModeSymlink == 0:
			return "", fmt.Errorf("%s is a file, want a folder", next)
		default:
			if hops++; hops > maxHops {
				return "", fmt.Errorf("more than %d links on the way", maxHops)
			}
			to, err := u.root.Readlink(next)
			if err != nil {
				return "", err
			}
			if path.IsAbs(to) {
				at = "."
			}
			todo = append(strings.FieldsFunc(to, func(r rune) bool { return r == '/' }), todo...)
		}
	}
	return at, nil
}

// whiteout removes an entry of lower layers, or all entries of a folder.
func (u *unpacker) whiteout(dir, name string) error {
	dir, err := u.walk(dir, false)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case name == ".wh..opq":
		return u.clear(dir)
	case strings.HasPrefix(name, ".wh."): // metadata of another tool
		return nil
	case name == "" || name == "." || name == "..":
		return errors.New("a whiteout without a name")
	}
	if at := path.Join(dir, name); !u.made[at] {
		return u.root.RemoveAll(at)
	}
	return nil
}

// clear removes the entries of a folder that this layer has not made.
func (u *unpacker) clear(dir string) error {
	f, err := u.root.Open(dir)
	if err != nil {
		return err
	}
	entries, err := f.ReadDir(-1)
	_ = f.Close() // it was only read
	for _, e := range entries {
		at := path.Join(dir, e.Name())
		switch {
		case !u.made[at]:
			err = errors.Join(err, u.root.RemoveAll(at))
		case e.IsDir():
			err = errors.Join(err, u.clear(at))
		}
	}
	return err
}

func (u *unpacker) link(at, to string) error {
	to, err := local(to)
	if err != nil {
		return fmt.Errorf("link: %w", err)
	}
	dir, base := path.Split(to)
	if dir, err = u.walk(dir, false); err != nil {
		return fmt.Errorf("link to %s: %w", to, err)
	}
	return u.root.Link(path.Join(dir, base), at)
}

func (u *unpacker) file(at string, e *tar.Header, from source) error {
	if u.left.bytes -= e.Size; e.Size < 0 || u.left.bytes < 0 {
		return fmt.Errorf("%d bytes, more than an image may have", e.Size)
	}
	content := from.content
	if from.file != "" {
		linked, err := u.linkFrom(from.file, at, e)
		if linked || err != nil {
			return err
		}
		f, err := os.Open(from.file)
		if err != nil {
			return err
		}
		defer f.Close()
		content = f
	}
	f, err := u.root.OpenFile(at, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	h := sha256.New()
	var w io.Writer = &early{file: f}
	if u.shares(e) {
		w = io.MultiWriter(w, h)
	}
	if u.buffer == nil {
		u.buffer = make([]byte, aheadChunk)
	}
	_, err = io.CopyBuffer(w, struct{ io.Reader }{content}, u.buffer)
	if err == nil {
		err = f.Chmod(mode(e))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := u.own(at, e); err != nil {
		return err
	}
	if err := u.root.Chtimes(at, e.ModTime, e.ModTime); err != nil {
		return err
	}
	if u.shares(e) {
		return u.share(at, fmt.Sprintf("%x-%o-%d-%d-%d", h.Sum(nil), mode(e), e.Uid, e.Gid, e.ModTime.UnixNano()))
	}
	return nil
}

// mode returns the mode of a file or folder, without set-user-ID and set-group-ID bits.
func mode(e *tar.Header) fs.FileMode {
	m := fs.FileMode(e.Mode) & fs.ModePerm
	if e.Typeflag == tar.TypeDir {
		m |= 0o700 // so that the store can remove it later
		if e.Mode&0o1000 != 0 {
			m |= fs.ModeSticky
		}
	}
	return m
}

func (u *unpacker) own(at string, e *tar.Header) error {
	if !u.chown {
		return nil
	}
	return u.root.Lchown(at, e.Uid, e.Gid)
}

// finish sets the modes and times of folders, after all their entries exist.
func (u *unpacker) finish() error {
	for at, e := range u.folder {
		if parent, err := u.walk(path.Dir(at), false); err != nil || parent != path.Dir(at) {
			continue // a later layer has replaced a parent
		}
		info, err := u.root.Lstat(at)
		if errors.Is(err, fs.ErrNotExist) || err == nil && !info.IsDir() {
			continue // a later layer has removed the folder
		}
		if err == nil {
			err = u.own(at, &e)
		}
		if err == nil {
			err = u.root.Chmod(at, mode(&e))
		}
		if err == nil {
			err = u.root.Chtimes(at, time.Time{}, e.ModTime)
		}
		if err != nil {
			return err
		}
	}
	return nil
}
