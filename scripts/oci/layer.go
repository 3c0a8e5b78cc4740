package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// file is a file, folder or symbolic link of an image.
type file struct {
	name  string // without a slash at its start or end
	kind  byte   // tar.TypeReg, tar.TypeDir or tar.TypeSymlink
	mode  int64  // permissions; of links, it is not used
	owner int    // user and group
	link  string // where a symbolic link leads to
	data  []byte
}

// program returns a program of an image with the content of a file on disk. Its mode in the image
// does not depend on the mode on disk.
func program(name, from string) (file, error) {
	b, err := os.ReadFile(from)
	return file{name: name, kind: tar.TypeReg, mode: 0o755, data: b}, err
}

func text(name, content string) file {
	return file{name: name, kind: tar.TypeReg, mode: 0o644, data: []byte(content)}
}

func folder(name string, mode int64, owner int) file {
	return file{name: name, kind: tar.TypeDir, mode: mode, owner: owner}
}

// layerOf returns a layer with the files, and with the folders that they are in. It sorts the files
// by name and gives them no times, so that their content alone determines the digest.
func layerOf(files []file) (v1.Layer, error) {
	var packed bytes.Buffer
	z, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if err := writeTar(z, withFolders(files)); err != nil {
		return nil, err
	}
	if err := z.Close(); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(packed.Bytes())), nil }
	return tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer))
}

// withFolders sorts the files by name and adds missing parent folders. Of several files with one
// name, it keeps the last one.
func withFolders(files []file) []file {
	byName := map[string]file{}
	for _, f := range files {
		byName[f.name] = f
	}
	for _, f := range files {
		for dir := path.Dir(f.name); dir != "."; dir = path.Dir(dir) {
			if _, ok := byName[dir]; !ok {
				byName[dir] = folder(dir, 0o755, 0)
			}
		}
	}
	all := make([]file, 0, len(byName))
	for _, f := range byName {
		all = append(all, f)
	}
	slices.SortFunc(all, func(a, b file) int { return strings.Compare(a.name, b.name) })
	return all
}

func writeTar(w io.Writer, files []file) error {
	t := tar.NewWriter(w)
	for _, f := range files {
		h := tar.Header{
			Name: f.name, Typeflag: f.kind, Mode: f.mode, Uid: f.owner, Gid: f.owner,
			ModTime: time.Unix(0, 0), Size: int64(len(f.data)), Linkname: f.link,
		}
		switch f.kind {
		case tar.TypeDir:
			h.Name += "/"
		case tar.TypeSymlink:
			h.Mode = 0o777
		}
		if err := t.WriteHeader(&h); err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
		if _, err := t.Write(f.data); err != nil {
			return fmt.Errorf("%s: %w", f.name, err)
		}
	}
	return t.Close()
}
