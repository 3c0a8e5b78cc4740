package container

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Folders is where containers have their folders. It is in memory on most machines, and empty after
// the machine's next start.
const Folders = sandbox.RunFolder + "/containers"

// folder is what a container has on this machine: its root, copies of files, and the socket of its
// first program.
type folder struct{ path string }

// recordFile names the file of a folder that has its record.
const recordFile = "owner"

// record says to which Runtime a folder belongs, and what its container is for.
type record struct {
	Node  string `json:"node"`
	Owner string `json:"owner"`

	Function string `json:"function,omitempty"`
	Replica  string `json:"replica,omitempty"`
	Class    string `json:"class,omitempty"`
	PID      int    `json:"pid,omitempty"` // of the program; 0: it does not run yet
}

// maxName is the most bytes of an id before its random part: containerd allows 76 in all.
const maxName = 76 - 14

// newID returns an id for a container that says what it is for. No other container has it.
func newID(c sandbox.Command, all map[string]string) string {
	name := c.Labels[sandbox.LabelFunction]
	if name == "" {
		name = all[sandbox.LabelFunction]
	}
	clean := strings.Trim(strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			return r
		}
		return '-'
	}, name), "-")
	for strings.Contains(clean, "--") {
		clean = strings.ReplaceAll(clean, "--", "-")
	}
	if clean == "" {
		clean = "process"
	}
	return strings.TrimRight(clean[:min(len(clean), maxName)], "-") + "-" + strings.ToLower(rand.Text()[:12])
}

// newFolder makes the folder of a container.
func newFolder(id string, of record) (*folder, error) {
	if err := os.MkdirAll(Folders, 0o700); err != nil {
		return nil, err
	}
	f := &folder{filepath.Join(Folders, id)}
	if err := os.Mkdir(f.path, 0o700); err != nil {
		return nil, err
	}
	return f, f.setRecord(of) // a Sweep removes folders without an owner
}

// setRecord writes the folder's record. Readers find the old or the new text.
func (f *folder) setRecord(of record) error {
	b, err := json.Marshal(of)
	if err != nil {
		return err
	}
	at := filepath.Join(f.path, recordFile)
	if err := os.WriteFile(at+".new", b, 0o600); err != nil {
		return err
	}
	return os.Rename(at+".new", at)
}

// record returns the folder's record.
func (f *folder) record() (of record, err error) {
	b, err := os.ReadFile(filepath.Join(f.path, recordFile))
	if err == nil {
		err = json.Unmarshal(b, &of)
	}
	return of, err
}

// mountRoot makes the root of a container. For a command with Chroot it is that folder with a layer
// in memory over it. Other roots are empty folders.
func (f *folder) mountRoot(c sandbox.Command) (string, error) {
	root := filepath.Join(f.path, "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		return "", err
	}
	if c.Chroot == "" {
		return root, nil
	}
	image, err := filepath.Abs(c.Chroot)
	if err != nil {
		return "", err
	}
	if info, err := os.Stat(image); err != nil {
		return "", err
	} else if !info.IsDir() {
		return "", fmt.Errorf("%s is a %v, want a folder", image, info.Mode().Type())
	}
	layer := filepath.Join(f.path, "layer")
	if err := os.Mkdir(layer, 0o700); err != nil {
		return "", err
	}
	if err := unix.Mount("tmpfs", layer, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755,size="+sandbox.Writable); err != nil {
		return "", fmt.Errorf("layer in memory: %w", err)
	}
	upper, work := filepath.Join(layer, "upper"), filepath.Join(layer, "work")
	if err := errors.Join(os.Mkdir(upper, 0o755), os.Mkdir(work, 0o755)); err != nil {
		return "", err
	}
	lower, err := openPath(image)
	if err != nil {
		return "", err
	}
	defer unix.Close(lower)
	// The path may have characters that overlay's options cannot have.
	options := fmt.Sprintf("lowerdir=/proc/self/fd/%d,upperdir=%s,workdir=%s", lower, upper, work)
	if err := unix.Mount("overlay", root, "overlay", unix.MS_NOSUID|unix.MS_NODEV, options); err != nil {
		return "", fmt.Errorf("layer over %s: %w", image, err)
	}
	return root, nil
}

func openPath(path string) (int, error) {
	fd, err := unix.Open(path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("folder %s: %w", path, err)
	}
	return fd, nil
}

// socketFolder makes the folder for the socket of the first program, which only its user enters.
func (f *folder) socketFolder(uid, gid int) (string, error) {
	path := filepath.Join(f.path, "run")
	if err := os.Mkdir(path, 0o700); err != nil {
		return "", err
	}
	return path, os.Chown(path, uid, gid)
}

// copyOf writes files into a folder that appears in the container.
func (f *folder) copyOf(name string, files map[string][]byte, mode fs.FileMode, uid, gid int) (string, error) {
	path := filepath.Join(f.path, name)
	if err := os.Mkdir(path, 0o755); err != nil {
		return "", err
	}
	for name, b := range files {
		at := filepath.Join(path, name)
		if err := errors.Join(os.WriteFile(at, b, mode), os.Chmod(at, mode), os.Chown(at, uid, gid)); err != nil {
			return "", err
		}
	}
	return path, nil
}

// memoryFolder names the folder of a folder whose files are never on a disk.
const memoryFolder = "files"

// inMemory makes the folder for secret files. Further calls do nothing.
func (f *folder) inMemory() error {
	at := filepath.Join(f.path, memoryFolder)
	if err := os.Mkdir(at, 0o755); errors.Is(err, fs.ErrExist) {
		return nil
	} else if err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", at, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755,size="+sandbox.Writable); err != nil {
		return fmt.Errorf("files in memory: %w", err)
	}
	return nil
}

// remove unmounts what is mounted in the folder, and removes it.
func (f *folder) remove() error {
	for _, name := range []string{"root", "layer", memoryFolder} {
		err := unix.Unmount(filepath.Join(f.path, name), unix.MNT_DETACH)
		// It may not be mounted, or not be there.
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("unmount %s: %w", filepath.Join(f.path, name), err)
		}
	}
	return os.RemoveAll(f.path)
}
