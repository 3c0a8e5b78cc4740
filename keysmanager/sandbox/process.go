package sandbox

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Command is a process to be started.
type Command struct {
	Dir            string            // where it runs, usually an image's root; with Chroot, a path in there
	Process        string            // as the env fprocess has it: program and arguments by spaces; empty: ./stage
	Argv           []string          // program and arguments, in place of Process, when they are known one by one
	Env            map[string]string // all that it gets beside PATH, HOME, LOGNAME, USER and TMPDIR, and in place of these
	Files          []*os.File        // descriptors 3, 4, …; the caller's to close
	Stdin          *os.File          // nil: empty; the caller's to close
	Stdout, Stderr *os.File          // the caller's to close
	Groups         []*os.File        // files opened for writing that it enters its cgroups with, before its first instruction; the caller's to close
	Stays          bool              // in the caller's process group, and ends with that; without Chroot

	// Hosts and Resolv are the paths of the files that appear as /etc/hosts and /etc/resolv.conf to the process; empty: the machine's.
	// They need Chroot or As. A process without a root of its own does not get a file that the machine has not.
	Hosts, Resolv string

	// As is who the process runs as, without Chroot; nil: as this one. It then reaches only what everybody does, Dir, and what
	// Reads and Writes name by absolute paths, under these, wherever they lie: Writes is its user's, the rest is read-only. Its /tmp,
	// /var/tmp and /dev/shm are memory of its own.
	As        *Account
	Reads     []string
	Writes    []string
	Processes int // with As: how many processes and threads its user may have; 0: MaxProcesses

	// Secrets is, with As, the absolute path of a folder that the account's group may read: the
	// secrets of a function. The process reads it at that path. It sees nothing else of RunFolder,
	// whether Secrets is empty or not.
	Secrets string

	// Network is an open network namespace in which the process starts; nil: that of this process.
	// It is the caller's to close.
	Network *os.File

	// Chroot is the folder that becomes the root of the process; empty: it has ours. What it writes there is kept in memory
	// and goes with it. It gets a /proc that shows its own processes alone, few devices, /etc/resolv.conf and /etc/hosts (see
	// Hosts), a user of the image's and few rights. The network is this process's. This program has to handle [InitCommand].
	Chroot   string
	Binds    []Bind // with Chroot
	GPUs     bool   // with Chroot: the devices of NVIDIA's driver are in its /dev, all of them; CUDA_VISIBLE_DEVICES says which are meant
	User     string // with Chroot: user[:group], names of the image's or numbers; empty: root
	ReadOnly bool   // with Chroot: nothing but /tmp and /dev/shm can be written to
}

// name is a file of the machine by which programs resolve names, and what takes its place; from empty: nothing does.
type name struct{ at, from string }

func (c Command) names() []name {
	return []name{{"/etc/hosts", c.Hosts}, {"/etc/resolv.conf", c.Resolv}}
}

func (c Command) argv() []string {
	switch fields := strings.Fields(c.Process); {
	case len(c.Argv) > 0:
		return c.Argv
	case len(fields) > 0:
		return fields
	}
	return []string{"./" + Executable}
}

func (c Command) stdin() io.Reader {
	if c.Stdin == nil {
		return nil // a nil *os.File would be none
	}
	return c.Stdin
}

// Spawner starts processes that end when this process does: the kernel sends them SIGKILL then. It does so when the
// *thread* that started them ends, so a Spawner keeps one thread of its own.
type Spawner struct {
	jobs chan func()
	done sync.WaitGroup
	once sync.Once
	quit chan struct{}

	// Of its thread alone.
	home     home  // its own namespaces
	untraced bool  // this machine has no ptrace for us: limits come a moment late
	fault    error // why it starts nothing any more
}

// ErrClosed says that a Spawner starts nothing any more.
var ErrClosed = errors.New("sandbox: closed")

// NewSpawner returns a Spawner; the caller closes it, after the processes have ended. Descriptors that this process was
// itself started with are closed in what it starts (from Linux 5.11 on; Go's own always are).
func NewSpawner() *Spawner {
	_ = unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC) // older kernels: they stay open
	s := &Spawner{jobs: make(chan func()), quit: make(chan struct{})}
	s.done.Go(func() {
		onThread(func() {
			s.home, s.fault = prepare()
			for {
				select {
				case job := <-s.jobs:
					job()
				case <-s.quit:
					s.home.close()
					return
				}
			}
		})
	})
	return s
}

// Close ends the Spawner's thread, and with it what it has started.
func (s *Spawner) Close() {
	s.once.Do(func() { close(s.quit) })
	s.done.Wait()
}

// Start starts the process as the leader of a session, and so of a process group, of its own, unless it stays. The caller waits for it, with
// [Wait].
func (s *Spawner) Start(c Command) (*exec.Cmd, error) {
	if c.Chroot != "" {
		return s.startInside(c)
	}
	cmd, err := c.cmd()
	if err == nil {
		err = s.run(cmd, c)
	}
	if errors.Is(err, unix.EACCES) && c.As != nil {
		err = fmt.Errorf("%w; it runs as a user of its own, want its files readable by all (chmod -R a+rX)", err)
	}
	if err != nil {
		return nil, fmt.Errorf("start %s in %s: %w", c.argv()[0], c.Dir, err)
	}
	return cmd, nil
}

// cmd is the command without a root of its own.
func (c Command) cmd() (*exec.Cmd, error) {
	argv := c.argv()
	program := argv[0]
	if strings.Contains(program, "/") && !filepath.IsAbs(program) {
		program = filepath.Join(c.Dir, program)
	}
	defaults := []string{"TMPDIR=" + Home}
	if dir := os.Getenv("GOCOVERDIR"); dir != "" { // coverage of a stage binary built for it
		defaults = append(defaults, "GOCOVERDIR="+dir)
	}
	var who []string
	var err error
	if c.As != nil {
		who = named(userName(c.As.UID), Home)
	} else if who, err = starter(); err != nil {
		return nil, err
	}
	env := environment(c.Env, append(defaults, who...))
	if c.As != nil {
		if program, err = c.program(env); err != nil {
			return nil, err
		}
	}
	cmd := exec.Command(program, argv[1:]...)
	if !strings.Contains(argv[0], "/") {
		cmd.Args[0] = argv[0]
	}
	cmd.ExtraFiles, cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Env = c.Files, c.stdin(), c.Stdout, c.Stderr, env
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: !c.Stays, Pdeathsig: syscall.SIGKILL}
	if c.As == nil {
		cmd.Dir = c.Dir
		return cmd, nil
	}
	cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWIPC                                                 // shared memory that nobody removes goes with it
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(c.As.UID), Gid: uint32(c.As.GID)} // and no further groups
	return cmd, nil
}

// run starts cmd from the thread whose end ends it.
func (s *Spawner) run(cmd *exec.Cmd, c Command) error {
	started := make(chan error, 1)
	select {
	case s.jobs <- func() { started <- s.begin(cmd, c) }:
		return <-started
	case <-s.quit:
		return ErrClosed
	}
}

// begin starts cmd on the thread that it runs on.
func (s *Spawner) begin(cmd *exec.Cmd, c Command) error {
	if s.fault != nil {
		return s.fault
	}
	groups, err := openEntry(c.Groups)
	if err != nil {
		return err
	}
	defer groups.close()
	if c.As != nil {
		leave, err := look(c, s.home.mounts)
		if err != nil {
			return err
		}
		defer func() { s.fault = errors.Join(s.fault, leave()) }()
	}
	if c.Network != nil {
		if err := unix.Setns(int(c.Network.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the network namespace: %w", err)
		}
		defer func() { s.fault = errors.Join(s.fault, s.home.leaveNetwork()) }()
	}
	first := *cmd
	cmd.SysProcAttr.Ptrace = !s.untraced // so that it stops before its first instruction
	err = groups.start(cmd)
	if errors.Is(err, unix.EPERM) && !s.untraced {
		*cmd = first
		cmd.SysProcAttr.Ptrace = false
		if err = groups.start(cmd); err == nil {
			s.untraced = true
		}
	}
	if err != nil {
		return err
	}
	if err := bound(cmd.Process.Pid, c, cmd.SysProcAttr.Ptrace); err != nil {
		_ = cmd.Process.Kill()
		Wait(cmd)
		return err
	}
	return nil
}

// Wait returns how a process that a Spawner started has ended, once it has; it is called once, in place of cmd.Wait. What the
// process has left in its process group is killed: it belonged to it, and nobody else would end it.
func Wait(cmd *exec.Cmd) unix.WaitStatus {
	err := error(unix.EINTR)
	for errors.Is(err, unix.EINTR) {
		err = unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
	}
	if err == nil {
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL) // not reaped yet, so the group's number is still its own
	}
	_ = cmd.Wait() // the state says how it ended
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
		return unix.WaitStatus(status)
	}
	return 0
}

// Path is the PATH of processes whose environment has none. Home is their TMPDIR, and the HOME of
// those that have a /tmp of their own and no other home folder.
const (
	Path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	Home = "/tmp"
)

// environment puts env over defaults and over what every process gets; each name is there once.
func environment(env map[string]string, defaults []string) []string {
	all := append([]string{"PATH=" + Path}, defaults...)
	all = slices.DeleteFunc(all, func(e string) bool {
		name, _, _ := strings.Cut(e, "=")
		_, there := env[name]
		return there
	})
	for _, k := range slices.Sorted(maps.Keys(env)) {
		all = append(all, k+"="+env[k])
	}
	return all
}
