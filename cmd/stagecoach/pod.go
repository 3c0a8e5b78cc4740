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

// podFolder and podNet are mounted read-only in a container that may not change the machine. A
// daemon's own groups are below the first one, and forwarding of the pod's network is below the
// second one.
const (
	podFolder = "/sys/fs/cgroup"
	podNet    = "/proc/sys/net"
)

// makeWritable mounts a folder of this process's mount namespace writable, with all mounts below
// it. The files keep their owners. It needs CAP_SYS_ADMIN.
func makeWritable(folder string) error {
	err := unix.MountSetattr(unix.AT_FDCWD, folder, unix.AT_RECURSIVE, &unix.MountAttr{Attr_clr: unix.MOUNT_ATTR_RDONLY})
	if errors.Is(err, unix.EINVAL) { // it is no mount point, so it is as writable as its parent
		err = nil
	}
	if err != nil {
		return fmt.Errorf("mount %s writable: %w; the container needs CAP_SYS_ADMIN and no AppArmor profile", folder, err)
	}
	return nil
}

// makePartWritable mounts a folder writable whose parents stay read-only.
func makePartWritable(folder string) error {
	if err := unix.Mount(folder, folder, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s: %w; the container needs CAP_SYS_ADMIN and no AppArmor profile", folder, err)
	}
	return makeWritable(folder)
}

// enterPod prepares this process for --pod.
func (c *keysManagerConfig) enterPod() error {
	if !c.pod {
		return nil
	}
	err := errors.Join(makeWritable(podFolder), makePartWritable(podNet))
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
// folder. A replacement machine with the same name and an empty disk is therefore a different node.
// It can join at once, although the name of the earlier node is taken for a day.
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
