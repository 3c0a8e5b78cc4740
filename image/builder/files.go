package builder

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// maxFolders bounds the depth of a handler's folders, because links may form a circle.
const maxFolders = 32

// walk calls f for each file of the handler and of the paths in the stack's configuration.copy.
// name is the file's path relative to the handler; for configuration.copy, to the current folder.
// walk follows links. It skips names with a leading dot and the files that `faas-cli build` skips.
func (b *Builder) walk(handler string, f func(file, name string) error) error {
	if err := walk(handler, "", 0, f); err != nil {
		return fmt.Errorf("handler: %w", err)
	}
	for _, extra := range b.stack.Configuration.Copy {
		if !filepath.IsLocal(extra) {
			return fmt.Errorf("configuration.copy: %q, want a path below the current folder", extra)
		}
		if err := walk(b.stack.Path(extra), filepath.ToSlash(filepath.Clean(extra)), 0, f); err != nil {
			return fmt.Errorf("configuration.copy: %w", err)
		}
	}
	return nil
}

func walk(at, name string, depth int, f func(file, name string) error) error {
	info, err := os.Stat(at)
	switch {
	case err != nil:
		if to, e := os.Readlink(at); e == nil && errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("%s is a link to %s, which is not there; make or fetch it first", at, to)
		}
		return err
	case info.Mode().IsRegular():
		return f(at, name)
	case !info.IsDir():
		return fmt.Errorf("%s is a %v, want files and folders", at, info.Mode().Type())
	case depth > maxFolders:
		return fmt.Errorf("%s is %d folders deep, want fewer", at, depth)
	}
	entries, err := os.ReadDir(at)
	if err != nil {
		return err
	}
	for _, e := range entries {
		n := e.Name()
		if strings.HasPrefix(n, ".") || depth == 0 && name == "" && (n == "build" || n == "template") {
			continue
		}
		if err := walk(filepath.Join(at, n), path.Join(name, n), depth+1, f); err != nil {
			return err
		}
	}
	return nil
}

// source reports whether a file is for the compiler or for people, and not for the image.
func source(name string) bool {
	if slices.Contains(strings.Split(path.Dir(name), "/"), "testdata") {
		return true
	}
	base := path.Base(name)
	return slices.Contains([]string{".go", ".c", ".h", ".s", ".md"}, path.Ext(base)) || base == "go.mod" || base == "go.sum"
}

// assemble makes the image's folder from the binary and the handler's files that are no sources.
func (b *Builder) assemble(dir, handler, binary string) error {
	put := func(file, name string) error {
		if name != stageFile && source(name) || name == stageFile && file != binary {
			return nil
		}
		// It copies, because an edit of the handler must not change images.
		return copyFile(file, filepath.Join(dir, filepath.FromSlash(name)))
	}
	if err := put(binary, stageFile); err != nil {
		return err
	}
	return b.walk(handler, put)
}

// size returns the total size of all files in a folder, in bytes.
func size(dir string) (n int64, err error) {
	err = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err == nil {
			n += info.Size()
		}
		return err
	})
	return n, err
}

// stageFile is the executable in an image.
const stageFile = "stage"

// copyFile copies content and permissions to a new file.
func copyFile(from, to string) error {
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, info.Mode().Perm()|0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Close())
}

// linkFile makes a hard link to a file, or a copy if the target is on another file system.
func linkFile(from, to string) error {
	from, err := filepath.EvalSymlinks(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	if os.Link(from, to) == nil {
		return nil
	}
	return copyFile(from, to)
}

// part matches a part of an image's name that can also be a folder's name.
var part = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._-]*$`)

// PutFolder makes IMAGES/REPOSITORY/TAG, the folder of the image REPOSITORY:TAG. Its content is
// that of the folder in the last argument. PutFolder prepares a new folder and then renames it, so
// that no file in use is changed. Unchanged files are linked from the old folder, so that building
// an image again does not give a new image. Packages of Python stages are links to the files of
// their layers.
func PutFolder(images, image, from string) error {
	repository, tag, ok := strings.Cut(image, ":")
	if !ok {
		tag = "latest"
	}
	parts := append(strings.Split(repository, "/"), tag)
	for _, p := range parts {
		if !part.MatchString(p) {
			return fmt.Errorf("image %q: %q, want repository[:tag] of letters, digits, '.', '_' and '-', such as stagecoach/ocr:0.1.0", image, p)
		}
	}
	to := filepath.Join(append([]string{images}, parts...)...)
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	// The folder is in the same file system, so that it can be renamed.
	next, err := os.MkdirTemp(filepath.Dir(to), ".new-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(next)
	if err := filepath.WalkDir(from, func(file string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(from, file)
		if err != nil {
			return err
		}
		dest := filepath.Join(next, "image", name)
		switch first, _, _ := strings.Cut(filepath.ToSlash(name), "/"); {
		case first == siteFolder: // links to the store's files
			return linkFile(file, dest)
		case same(filepath.Join(to, name), file):
			return linkFile(filepath.Join(to, name), dest)
		}
		return copyFile(file, dest)
	}); err != nil {
		return err
	}
	if err := os.Rename(to, filepath.Join(next, "old")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.Rename(filepath.Join(next, "image"), to)
}

// same reports whether two files have the same content and permissions.
func same(a, b string) bool {
	x, err := os.Open(a)
	if err != nil {
		return false
	}
	defer x.Close()
	y, err := os.Open(b)
	if err != nil {
		return false
	}
	defer y.Close()
	i, err := x.Stat()
	j, err2 := y.Stat()
	if err != nil || err2 != nil || i.Mode() != j.Mode() || i.Size() != j.Size() {
		return false
	}
	p, q := make([]byte, 64<<10), make([]byte, 64<<10)
	for {
		n, err := io.ReadFull(x, p)
		m, err2 := io.ReadFull(y, q)
		if n != m || !bytes.Equal(p[:n], q[:m]) {
			return false
		}
		if err != nil || err2 != nil {
			return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
		}
	}
}

// templateFiles copies a template into a build context. With ownCode, it leaves out the handler's
// code, because the user has replaced it.
func templateFiles(template fs.FS, dir string, ownCode bool) error {
	return fs.WalkDir(template, ".", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || ownCode && path.Dir(name) == "function" && path.Ext(name) == ".go" {
			return err
		}
		b, err := fs.ReadFile(template, name)
		if err != nil {
			return err
		}
		to := filepath.Join(dir, filepath.FromSlash(name))
		return errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, b, 0o644))
	})
}
