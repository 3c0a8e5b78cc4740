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

// claimWait is how long another process may take to sweep a node's folder.
const claimWait = time.Second

// claim locks a folder. If the folder is locked already, also by another caller in this process,
// claim waits for at most the given time. The lock ends when the returned file is closed or this
// process ends. If the folder was removed before it was locked, claim returns fs.ErrNotExist, even
// if there is a new folder with the same name.
func claim(folder string, wait time.Duration) (*os.File, error) {
	f, err := os.Open(folder)
	if err != nil {
		return nil, err
	}
	// No event reports that another process releases the lock, so claim polls.
	for until := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
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

// sweep removes the empty groups of nodes whose owner has died, for example by SIGKILL. Groups with
// processes stay, because their owner may come back.
func (r *Root) sweep() {
	all := filepath.Dir(r.folders()[0])
	nodes, err := os.ReadDir(all)
	if err != nil {
		return // the rest takes only kernel memory
	}
	for _, n := range nodes {
		if !n.IsDir() || n.Name() == r.node {
			continue
		}
		lock, err := claim(filepath.Join(all, n.Name()), 0)
		if err != nil {
			continue // another process has it open
		}
		// The locked folder is removed last, because another process may take the name after that.
		for _, folder := range slices.Backward(r.folders()) {
			dir := filepath.Join(filepath.Dir(folder), n.Name())
			names, _ := folderNames(dir) // of none, nothing is removed
			for _, name := range names {
				_ = os.Remove(filepath.Join(dir, pathOf(name))) // fails with processes in it
				if family := filepath.Dir(pathOf(name)); family != "." {
					_ = os.Remove(filepath.Join(dir, family)) // fails with groups in it
				}
			}
			_ = os.Remove(dir)
		}
		_ = lock.Close() // it was only locked
	}
}
