package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// claimWait is how long another one may be sweeping a node's folder.
const claimWait = time.Second

// claim locks a folder for as long as the file is open, also against others of this process. The kernel unlocks it when its owner
// dies. One that was removed meanwhile, even if there is another of its name by now, is fs.ErrNotExist.
func claim(folder string, wait time.Duration) (*os.File, error) {
	f, err := os.Open(folder)
	if err != nil {
		return nil, err
	}
	for until := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) { // nobody tells of its end
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			there, err := f.Stat()
			here, err2 := os.Stat(folder)
			if err == nil && err2 == nil && os.SameFile(there, here) {
				return f, nil
			}
			_ = f.Close()
			return nil, fmt.Errorf("%s: %w", folder, fs.ErrNotExist)
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || !time.Now().Before(until) {
			_ = f.Close()
			return nil, fmt.Errorf("%s is in use (%w)", folder, err)
		}
	}
}

// sweep removes the empty groups of nodes whose owner has died, as after a SIGKILL. Those with processes stay: their owner may
// come back for them.
func (r *Root) sweep() {
	all := filepath.Dir(r.folders()[0])
	nodes, err := os.ReadDir(all)
	if err != nil {
		return // what is left takes no more than memory of the kernel
	}
	for _, n := range nodes {
		if !n.IsDir() || n.Name() == r.node {
			continue
		}
		lock, err := claim(filepath.Join(all, n.Name()), 0)
		if err != nil {
			continue // somebody is there
		}
		for _, folder := range slices.Backward(r.folders()) { // the one that is locked goes last: then another can have the name
			dir := filepath.Join(filepath.Dir(folder), n.Name())
			groups, _ := os.ReadDir(dir) // of none, nothing is removed
			for _, g := range groups {
				if g.IsDir() {
					_ = os.Remove(filepath.Join(dir, g.Name())) // fails with processes in it
				}
			}
			_ = os.Remove(dir)
		}
		_ = lock.Close() // it was only locked
	}
}
