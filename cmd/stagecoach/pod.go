package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"
)

// podFolders are mounted read-only in a container without the right to change the machine. A
// daemon's own groups and forwarding are below them.
var podFolders = []string{"/sys/fs/cgroup", "/proc/sys"}

// makeWritable mounts folders of this process's mount namespace writable, with all mounts below
// them. The files keep their owners, and the namespaces of the process still bound what it can
// change. It needs CAP_SYS_ADMIN.
func makeWritable(folders []string) error {
	var errs []error
	for _, folder := range folders {
		err := unix.MountSetattr(unix.AT_FDCWD, folder, unix.AT_RECURSIVE, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY})
		if errors.Is(err, unix.EINVAL) { // it is no mount point, so it is as writable as its parent
			err = nil
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("mount %s writable: %w; the container needs CAP_SYS_ADMIN and no AppArmor profile", folder, err))
		}
	}
	return errors.Join(errs...)
}

// enterPod prepares this process for --pod.
func (c *keysManagerConfig) enterPod() error {
	if !c.pod {
		return nil
	}
	err := makeWritable(podFolders)
	if err == nil {
		c.node, err = podNodeName(c.node, c.state)
	}
	if err != nil {
		return fmt.Errorf("--pod: %w", err)
	}
	return nil
}

// suffixFile has the random part of a node's name, in its state folder.
const suffixFile = "name-suffix"

var suffixFormat = regexp.MustCompile(`^[a-z2-7]{5}$`)

// podNodeName returns the name of a node with a random part behind it, which is kept in the state
// folder. A machine that takes another one's place, with the same name and an empty disk, is so
// another node. It can join at once, although the name of the earlier node is taken for a day.
func podNodeName(name, state string) (string, error) {
	file := filepath.Join(state, suffixFile)
	b, err := os.ReadFile(file)
	if suffix := strings.TrimSpace(string(b)); err == nil && suffixFormat.MatchString(suffix) {
		return name + "-" + suffix, nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	suffix := strings.ToLower(rand.Text()[:5])
	if err := os.MkdirAll(state, 0o700); err != nil {
		return "", err
	}
	return name + "-" + suffix, os.WriteFile(file, []byte(suffix+"\n"), 0o600)
}
