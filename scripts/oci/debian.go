package main

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// lockFile pins the Debian packages of the images.
const lockFile = "scripts/oci/debian.lock"

// debianPackages are the packages of the lock file: what the dynamic program and ONNX Runtime link,
// certificates, time zones, and the files that tell scanners which system this is.
var debianPackages = []string{"base-files", "ca-certificates", "gcc-12-base", "libc6", "libgcc-s1", "libstdc++6", "tzdata"}

// deb is a Debian package: a line of the lock file.
type deb struct{ name, version, arch, sha256 string }

// keep matches the files of packages that images get. The rest is programs, documentation, and
// tables of character sets, which nothing in the images uses.
var keep = regexp.MustCompile(`^(lib|lib64|usr/lib)/(x86_64-linux-gnu/)?[^/]+\.so[^/]*$` +
	`|^usr/lib/os-release$|^etc/(os-release|debian_version)$` +
	`|^usr/share/(ca-certificates|zoneinfo|common-licenses)/|^usr/share/doc/([^/]+|[^/]+/copyright)$`)

// readLock reads a lock file, which has a line per package: name, version, architecture, SHA-256.
func readLock(name string) (all []deb, err error) {
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(b)) {
		line, _, _ = strings.Cut(line, "#")
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		if len(f) != 4 || len(f[3]) != sha256.Size*2 {
			return nil, fmt.Errorf("%s: line %q, want NAME VERSION ARCHITECTURE SHA256", name, strings.TrimSpace(line))
		}
		all = append(all, deb{f[0], f[1], f[2], f[3]})
	}
	return all, nil
}

// printed is a line of `apt-get download --print-uris`: address, file, size, hash.
var printed = regexp.MustCompile(`(?m)^'[^']*' ([^ _]+)_([^ _]+)_([^ _]+)\.deb [0-9]+ SHA256:([0-9a-f]{64})$`)

// writeLock pins the versions of the packages that this machine's package lists have.
func writeLock(ctx context.Context, name string) error {
	args := append([]string{"download", "--print-uris"}, debianPackages...)
	out, err := exec.CommandContext(ctx, "apt-get", args...).Output()
	if err != nil {
		return fmt.Errorf("apt-get %s: %w", strings.Join(args, " "), withStderr(err))
	}
	var lines []string
	for _, m := range printed.FindAllStringSubmatch(string(out), -1) {
		version := strings.NewReplacer("%3a", ":", "%2b", "+", "%7e", "~").Replace(m[2])
		lines = append(lines, strings.Join([]string{m[1], version, m[3], m[4]}, " ")+"\n")
	}
	if len(lines) != len(debianPackages) {
		return fmt.Errorf("apt-get has %d of the packages %v with a SHA-256, want all", len(lines), debianPackages)
	}
	slices.Sort(lines)
	head := "# The Debian packages of the images: name, version, architecture, SHA-256.\n" +
		"# `go run ./scripts/oci lock` writes this file.\n"
	return os.WriteFile(name, []byte(head+strings.Join(lines, "")), 0o644)
}

// fetch returns the path of a package's file in the cache. It downloads the file with apt-get if
// the cache does not have it.
func (d deb) fetch(ctx context.Context, cache string) (string, error) {
	to, err := filepath.Abs(filepath.Join(cache, d.sha256+".deb"))
	if err != nil {
		return "", err
	}
	if d.check(to) == nil {
		return to, nil
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	tmp, err := os.MkdirTemp(cache, "download-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(tmp)
	cmd := exec.CommandContext(ctx, "apt-get", "download", "-q", d.name+"="+d.version)
	cmd.Dir = tmp
	if _, err := cmd.Output(); err != nil {
		return "", fmt.Errorf("apt-get download %s=%s: %w; run `apt-get update`, or pin the present versions with `go run ./scripts/oci lock`", d.name, d.version, withStderr(err))
	}
	found, err := filepath.Glob(filepath.Join(tmp, "*.deb"))
	if err != nil || len(found) != 1 {
		return "", errors.Join(fmt.Errorf("apt-get download %s: %d files, want 1", d.name, len(found)), err)
	}
	if err := d.check(found[0]); err != nil {
		return "", err
	}
	return to, os.Rename(found[0], to)
}

// check compares a file with the lock's hash.
func (d deb) check(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	if got := hex.EncodeToString(h.Sum(nil)); got != d.sha256 {
		return fmt.Errorf("%s %s: the file has SHA-256 %s, want %s, as the lock file says", d.name, d.version, got, d.sha256)
	}
	return nil
}

// files returns the files of a package's archive that images get, and its entry for scanners.
func (d deb) files(ctx context.Context, archive string) ([]file, error) {
	fields, err := exec.CommandContext(ctx, "dpkg-deb", "--field", archive).Output()
	if err != nil {
		return nil, fmt.Errorf("dpkg-deb --field %s: %w", archive, withStderr(err))
	}
	content, err := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", archive).Output()
	if err != nil {
		return nil, fmt.Errorf("dpkg-deb --fsys-tarfile %s: %w", archive, withStderr(err))
	}
	files := []file{text("var/lib/dpkg/status.d/"+d.name, string(fields))}
	for t := tar.NewReader(bytes.NewReader(content)); ; {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		} else if err != nil {
			return nil, fmt.Errorf("%s: %w", d.name, err)
		}
		f := file{name: path.Clean(strings.TrimPrefix(h.Name, "./")), kind: h.Typeflag, mode: h.Mode & 0o755, link: h.Linkname}
		switch h.Typeflag {
		case tar.TypeDir:
			continue // added again if a file in it is kept
		case tar.TypeLink: // zoneinfo has many; a relative symbolic link does the same
			rel, err := filepath.Rel(path.Dir(f.name), path.Clean(strings.TrimPrefix(h.Linkname, "./")))
			if err != nil {
				return nil, err
			}
			f.kind, f.link = tar.TypeSymlink, rel
		case tar.TypeReg:
			if f.data, err = io.ReadAll(t); err != nil {
				return nil, fmt.Errorf("%s: %s: %w", d.name, h.Name, err)
			}
		case tar.TypeSymlink:
		default:
			return nil, fmt.Errorf("%s: %s has type %q, want a file, a folder or a link", d.name, h.Name, h.Typeflag)
		}
		if keep.MatchString(f.name) {
			files = append(files, f)
		}
	}
}

// debianFiles returns the files of all packages, and the bundle of certificates, which Debian makes
// at the installation.
func debianFiles(ctx context.Context, all []deb, cache string) (files []file, err error) {
	for _, d := range all {
		archive, err := d.fetch(ctx, cache)
		if err != nil {
			return nil, err
		}
		more, err := d.files(ctx, archive)
		if err != nil {
			return nil, err
		}
		files = append(files, more...)
	}
	var bundle bytes.Buffer
	for _, f := range withFolders(files) {
		if strings.HasPrefix(f.name, "usr/share/ca-certificates/") && strings.HasSuffix(f.name, ".crt") {
			bundle.Write(bytes.TrimRight(f.data, "\n"))
			bundle.WriteByte('\n')
		}
	}
	if bundle.Len() == 0 {
		return nil, errors.New("the packages have no certificates, want those of ca-certificates")
	}
	files = slices.DeleteFunc(files, func(f file) bool { return strings.HasPrefix(f.name, "usr/share/ca-certificates/") })
	return append(files, text("etc/ssl/certs/ca-certificates.crt", bundle.String())), nil
}

// withStderr adds the last line that a program has printed to its error.
func withStderr(err error) error {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return err
	}
	last := ""
	for s := bufio.NewScanner(bytes.NewReader(exit.Stderr)); s.Scan(); {
		last = s.Text()
	}
	return fmt.Errorf("%w: %s", err, last)
}
