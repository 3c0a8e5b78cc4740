package sandbox

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
)

// Images is the folder that holds the process runtime's images. The image
// stagecoach/ocr-detect:0.1.0 is its subfolder stagecoach/ocr-detect/0.1.0.
type Images struct{ Dir string }

// Image is a folder with an executable and its files.
type Image struct {
	Name string
	Root string // absolute, links resolved
	// Digest identifies the content. The digest of a folder covers names, sizes and modification
	// times, because reading a gigabyte would take seconds.
	Digest string

	Stage bool // it speaks the stage protocol; a folder does if it has an executable ./stage

	// The following fields are set for OCI images only.
	Rootfs     bool     // its processes need Root as their root (Command.Chroot)
	Entrypoint []string // program and arguments
	Env        []string // NAME=value; the function's environment overrides it
	WorkDir    string   // absolute, inside Root; empty: /
	User       string   // user[:group]: numbers, or names that the image lists; empty: root
	ReadOnly   bool     // with Rootfs, if the function asks for it: Command.ReadOnly
	Options    Options  // what the function asks for: Command.Options
}

// Executable is the program of an image unless its function names another.
const Executable = "stage"

var part = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9._-]*$`)

// folder returns the path that the image has if it exists.
func (s Images) folder(image string) (string, error) {
	repository, tag, ok := strings.Cut(image, ":")
	if !ok {
		tag = "latest"
	}
	parts := append(strings.Split(repository, "/"), tag)
	for _, p := range parts {
		if !part.MatchString(p) {
			return "", fmt.Errorf("image %q: %q, want repository[:tag] of letters, digits, '.', '_' and '-', such as stagecoach/ocr-detect:0.1.0", image, p)
		}
	}
	return filepath.Join(append([]string{s.Dir}, parts...)...), nil
}

// Check returns why image cannot be run, or nil.
func (s Images) Check(image string) error {
	folder, err := s.folder(image)
	if err != nil {
		return err
	}
	if info, err := os.Stat(folder); err != nil || !info.IsDir() {
		return fmt.Errorf("image %q: no folder %s; build it (stagecoach build), or name the folder of images with --images", image, folder)
	}
	return nil
}

// Resolve finds the image and describes its current content.
func (s Images) Resolve(image string) (Image, error) {
	if err := s.Check(image); err != nil {
		return Image{}, err
	}
	folder, err := s.folder(image)
	if err != nil {
		return Image{}, err
	}
	if folder, err = filepath.Abs(folder); err != nil {
		return Image{}, fmt.Errorf("image %q: %w", image, err)
	}
	// A tag may be a link to another tag; the files there count.
	if folder, err = filepath.EvalSymlinks(folder); err != nil {
		return Image{}, fmt.Errorf("image %q: %w", image, err)
	}
	digest, err := digest(folder)
	if err != nil {
		return Image{}, fmt.Errorf("image %q: %w", image, err)
	}
	return Image{Name: image, Root: folder, Digest: digest, Stage: executable(filepath.Join(folder, Executable))}, nil
}

func executable(file string) bool {
	info, err := os.Stat(file)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// maxFiles bounds the number of files in an image, because each start looks at all of them. An
// image with PyTorch has about 30,000 files.
const maxFiles = 100_000

func digest(folder string) (string, error) {
	h := sha256.New()
	files := 0
	err := filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if files++; files > maxFiles {
			return fmt.Errorf("more than %d files in %s, want fewer", maxFiles, folder)
		}
		info, err := os.Stat(path) // follows links
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(folder, path)
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%q %d %d\n", rel, info.Size(), info.ModTime().UnixNano())
		if st, ok := info.Sys().(*syscall.Stat_t); ok && info.ModTime().UnixNano() == 0 {
			// Packages have no times, so a new file may have the old size and time.
			fmt.Fprintf(h, "%d\n", st.Ino)
		}
		return nil
	})
	return hex.EncodeToString(h.Sum(nil)[:16]), err
}
