package sandbox

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// entry moves the Spawner's thread into a process's cgroups, starts the process there, and moves
// the thread back. openEntry must run before the thread enters the process's mount namespace,
// because cgroups cannot be written to from there.
type entry struct {
	// Files named tasks, of cgroups v1. groups are those of the process, which their owner closes.
	// home are those of this thread.
	groups, home []*os.File
	unified      *os.File // file cgroup.procs of v2, which its owner closes; nil: there is none
}

func openEntry(groups []*os.File) (e entry, err error) {
	for _, f := range groups {
		var s unix.Statfs_t
		if err := unix.Fstatfs(int(f.Fd()), &s); err != nil {
			return e, fmt.Errorf("cgroup: %w", err)
		}
		if s.Type != unix.CGROUP2_SUPER_MAGIC {
			e.groups = append(e.groups, f)
			continue
		}
		e.unified = f
	}
	e.home, err = homes(e.groups)
	return e, err
}

func (e entry) close() { closeAll(e.home) }

// start starts cmd in the groups from its first instruction on. In v2, the kernel starts it there.
// In v1, this thread enters the groups, starts cmd, and goes back.
func (e entry) start(cmd *exec.Cmd) error {
	err := enterAll(e.groups)
	if err == nil {
		err = startUnified(cmd, e.unified)
	}
	// In the group, this thread must not do other work, and the group could not be removed.
	if back := enterAll(e.home); back != nil {
		err = errors.Join(err, fmt.Errorf("the way back: %w", back))
		if cmd.Process != nil {
			_ = cmd.Process.Kill()
			wait(cmd)
		}
	}
	return err
}

// startUnified starts cmd in the group of cgroups v2 whose file cgroup.procs is procs. If procs is
// nil, cmd starts in this process's group.
func startUnified(cmd *exec.Cmd, procs *os.File) error {
	if procs == nil {
		return cmd.Start()
	}
	folder, err := os.Open(filepath.Dir(nameOf(procs)))
	if err != nil {
		return fmt.Errorf("cgroup: %w", err)
	}
	defer folder.Close()
	cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(folder.Fd())
	err = cmd.Start()
	if !errors.Is(err, unix.ENOSYS) {
		return err
	}
	// The kernel or a filter on system calls lacks clone3. Move the process into the group right after
	// its start.
	cmd.SysProcAttr.UseCgroupFD = false
	*cmd = exec.Cmd{
		Path: cmd.Path, Args: cmd.Args, Env: cmd.Env, Dir: cmd.Dir, Stdin: cmd.Stdin, Stdout: cmd.Stdout, Stderr: cmd.Stderr,
		ExtraFiles: cmd.ExtraFiles, SysProcAttr: cmd.SysProcAttr,
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	if _, err := procs.WriteString(strconv.Itoa(cmd.Process.Pid)); err != nil && !errors.Is(err, unix.ESRCH) {
		_ = cmd.Process.Kill()
		wait(cmd)
		return fmt.Errorf("cgroup: %w", err)
	}
	return nil
}

// enterAll moves this thread into groups of v1. files are the groups' files named tasks.
func enterAll(files []*os.File) error {
	var errs []error
	for _, f := range files {
		if _, err := syscall.Write(int(f.Fd()), []byte("0")); err != nil { // "0" means the writing thread
			errs = append(errs, fmt.Errorf("cgroup %s: %w", nameOf(f), err))
		}
	}
	return errors.Join(errs...)
}

// homes opens the file tasks of this thread's current group in each hierarchy of cgroups v1 that
// the given files belong to. The caller closes the results.
func homes(files []*os.File) ([]*os.File, error) {
	if len(files) == 0 {
		return nil, nil
	}
	own, err := os.ReadFile("/proc/thread-self/cgroup")
	if err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("cgroup: %w", err)
	}
	var all []*os.File
	for _, f := range files {
		var home *os.File
		var s unix.Stat_t
		if err = unix.Fstat(int(f.Fd()), &s); err == nil {
			//nolint:unconvert // the type differs on other machines
			device := fmt.Sprintf("%d:%d", unix.Major(s.Dev), unix.Minor(s.Dev))
			home, err = openHome(device, string(own), string(mounts))
		}
		if err != nil {
			closeAll(all)
			return nil, fmt.Errorf("cgroup %s: %w", nameOf(f), err)
		}
		all = append(all, home)
	}
	return all, nil
}

// openHome opens the file tasks of a thread's group, in the hierarchy that is mounted from a
// device. own is the content of /proc/PID/cgroup, and mounts is the content of /proc/PID/mountinfo.
func openHome(device, own, mounts string) (*os.File, error) {
	dir, err := homeIn(device, own, mounts)
	if err != nil {
		return nil, err
	}
	return os.OpenFile(filepath.Join(dir, "tasks"), os.O_WRONLY, 0)
}

// homeIn returns the folder of that group. cgroups(7) and proc_pid_mountinfo(5) describe the
// formats.
func homeIn(device, own, mounts string) (string, error) {
	for line := range strings.Lines(mounts) {
		f := strings.Fields(line)
		dash := slices.Index(f, "-")
		if dash < 6 || len(f) < dash+4 || f[2] != device {
			continue
		}
		options := strings.Split(f[dash+3], ",")
		for line := range strings.Lines(own) {
			part := strings.SplitN(strings.TrimSpace(line), ":", 3)
			if len(part) < 3 || !slices.Contains(options, strings.Split(part[1], ",")[0]) {
				continue
			}
			rel, err := filepath.Rel(f[3], part[2])
			if err == nil && rel != ".." && !strings.HasPrefix(rel, "../") {
				return filepath.Join(f[4], rel), nil
			}
		}
	}
	return "", errors.New("the group of this process is in no mounted cgroup file system")
}

// nameOf returns the path of a descriptor, which may come from another process.
func nameOf(f *os.File) string {
	if path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd())); err == nil {
		return path
	}
	return f.Name()
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
