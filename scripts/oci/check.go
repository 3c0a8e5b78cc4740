package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// check builds the images of this work tree again, and compares them with those in out. The second
// build has another folder, other times of files, another umask, and an empty cache of Go, so it
// compiles everything again.
func check(ctx context.Context, cache, out string, log io.Writer) (err error) {
	s, err := sourceOf(ctx, ".")
	if err != nil {
		return err
	}
	cache, err = filepath.Abs(cache)
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp("", "stagecoach-oci-check-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	syscall.Umask(0o077)
	copied := s
	copied.root = filepath.Join(tmp, "a", "copy of the tree")
	if err := copyTree(ctx, s.root, copied.root); err != nil {
		return err
	}
	if err := os.Setenv("GOCACHE", filepath.Join(tmp, "gocache")); err != nil {
		return err
	}
	second, err := build(ctx, copied, cache, filepath.Join(tmp, "oci"), io.Discard)
	if err != nil {
		return err
	}
	for _, name := range names {
		index, tag, err := readLayout(filepath.Join(out, name))
		if err != nil {
			return err
		}
		if tag != s.tag() {
			return fmt.Errorf("%s is version %s, want %s: run make images-oci first", name, tag, s.tag())
		}
		first, err := index.Digest()
		if err != nil {
			return err
		}
		if first.String() != second[name] {
			return fmt.Errorf("%s: digest %s, and %s when it is built again", name, first, second[name])
		}
		fmt.Fprintf(log, "%s: %s, twice\n", name, first)
	}
	return nil
}

// copyTree copies the files that git knows or would add, and ONNX Runtime.
func copyTree(ctx context.Context, from, to string) error {
	list, err := git(ctx, from, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	if err != nil {
		return err
	}
	for name := range strings.SplitSeq(list+ort, "\x00") {
		info, err := os.Lstat(filepath.Join(from, name))
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted, and not committed yet
		} else if err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(to, name)), 0o700); err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			continue // links, which no Go package has
		}
		b, err := os.ReadFile(filepath.Join(from, name))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(to, name), b, 0o600|info.Mode()&0o100); err != nil {
			return err
		}
	}
	return nil
}
