package sandbox

import (
	"context"
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

// Runtime starts processes. Its methods are safe for concurrent use.
type Runtime interface {
	// Start starts the process of a command. If ctx ends first, Start fails soon, and the Runtime
	// removes what has been begun, at the latest in Close. A process that runs does not end with ctx.
	Start(ctx context.Context, c Command) (Process, error)
	// Close ends the Runtime and its processes. The caller calls it after they have ended.
	Close()
}

// Process is a process that a Runtime has started.
type Process interface {
	// PID returns the number of the process on this machine. It stays the same after its end.
	PID() int
	// Signal signals the process. The error says why it cannot be signaled; most often, it has ended.
	Signal(s syscall.Signal) error
	// Wait waits until the process has ended, and returns how it ended. The caller calls it once.
	// Other processes of its process group, or of its container, end with it.
	Wait() unix.WaitStatus
	// Forget removes what the Runtime keeps of a process that has ended, once nobody reads the
	// counters of its cgroup any more. The caller calls it after Wait.
	Forget()
}

// Command describes a process that a Runtime starts.
type Command struct {
	// Dir is the working folder, usually an image's root; with Chroot, a path inside the root.
	Dir string
	// Process is the program and its arguments, separated by spaces, as in fprocess; empty: ./stage.
	Process string
	Argv    []string // program and arguments as a list, in place of Process
	// Env is added to PATH, HOME, LOGNAME, USER and TMPDIR, or in place of them.
	Env            map[string]string
	Files          []*os.File // descriptors 3, 4, …; the caller closes them
	Stdin          *os.File   // nil: empty; the caller closes it
	Stdout, Stderr *os.File   // the caller closes them
	// Groups are files of cgroups, open for writing. The process enters these groups before its first
	// instruction. The caller closes the files.
	Groups []*os.File
	Stays  bool // it stays in the caller's process group and ends with that; only without Chroot

	Purpose
	Names

	// As is the account that the process runs as, without Chroot; nil: this process's user. A process
	// with an account sees only Dir, Reads, Writes and what every user can reach. It can write only to
	// Writes and to its private /tmp, /var/tmp and /dev/shm, which are in memory. Reads and Writes are
	// absolute paths; the process sees each file at its own path.
	As        *Account
	Reads     []string
	Writes    []string
	Processes int // with As: the limit of processes and threads of its user; 0: MaxProcesses

	// Secrets, with As, is the folder of the function's secrets, as an absolute path. The account's
	// group may read it, and the process sees it at the same path. The process sees nothing else of
	// RunFolder, even without Secrets.
	Secrets string

	// Network is an open network namespace in which the process starts; nil: that of this process. The
	// caller closes it.
	Network *os.File

	// Chroot is the folder that becomes the root of the process; empty: the root of this process. The
	// process's writes to its root stay in memory and are lost when the process ends. The root has a
	// /proc with only the process's own processes, few devices, and /etc/resolv.conf and /etc/hosts
	// (see Hosts). The program runs as a user of the image, with few rights. Without Network, it has
	// the network of this process. The program that calls the Spawner must handle [InitCommand].
	Chroot string
	Binds  []Bind // with Chroot
	// GPUs adds all devices of NVIDIA's driver to /dev, with Chroot. CUDA_VISIBLE_DEVICES says which
	// of them the process may use.
	GPUs     bool
	User     string // with Chroot: user[:group], numbers or names that the image lists; empty: root
	ReadOnly bool   // with Chroot: only /tmp and /dev/shm can be written to
}

// Purpose says what a process is for.
type Purpose struct {
	// Platform says that the process is a part of Stagecoach, such as a watchdog. Each Runtime starts
	// it as a Spawner does.
	Platform bool
	// Labels say what the process is for, to the tools of operators: see the names that begin with
	// Label.
	Labels map[string]string
	// Options are what the function asks for. Processes of the platform have none.
	Options Options
	// Held says that the process waits before it runs the program, until its [Holder] lets it go. The
	// last of Files is then the process's end of a Holder, and is not the program's. Only containers
	// can be held.
	Held bool
}

// Names are the files by which a process resolves names.
type Names struct {
	// Hosts and Resolv are paths of files that the process sees as /etc/hosts and /etc/resolv.conf;
	// empty: the machine's files. Both need Chroot or As. With As, a file that the machine does not
	// have is left out.
	Hosts, Resolv string
}

// Names of a Command's Labels.
const (
	LabelFunction = "function"
	LabelImage    = "image"   // the name that the node knows
	LabelReplica  = "replica" // or what else it is, such as a zygote
	LabelEntry    = "entry"   // unique name of the process on its node
)

// name is one of the machine's files for resolving names, and the file that replaces it. If from is
// empty, nothing replaces it.
type name struct{ at, from string }

func (c Command) names() []name {
	return []name{{"/etc/hosts", c.Hosts}, {"/etc/resolv.conf", c.Resolv}}
}

// Args returns the program and its arguments.
func (c Command) Args() []string {
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
		return nil // a nil *os.File in the interface would not be nil
	}
	return c.Stdin
}

// Spawner starts processes that end when this process ends: the kernel sends them SIGKILL. The
// kernel does so when the *thread* that started them ends, so a Spawner keeps a thread of its own.
type Spawner struct {
	jobs chan func()
	done sync.WaitGroup
	once sync.Once
	quit chan struct{}

	// Only the Spawner's thread uses these fields.
	home     home  // the thread's own namespaces
	untraced bool  // this machine does not allow ptrace, so limits are set a moment after the start
	fault    error // why the Spawner no longer starts processes
}

// ErrClosed means that a Spawner no longer starts processes.
var ErrClosed = errors.New("sandbox: closed")

// NewSpawner returns a Spawner. The caller closes it after its processes have ended. Its processes
// inherit no descriptors except those of their Commands. On Linux before 5.11, they may also
// inherit descriptors that this process has inherited.
func NewSpawner() *Spawner {
	// Older kernels fail, and the descriptors stay open.
	_ = unix.CloseRange(3, math.MaxInt32, unix.CLOSE_RANGE_CLOEXEC)
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

// Close ends the Spawner's thread, which ends its processes.
func (s *Spawner) Close() {
	s.once.Do(func() { close(s.quit) })
	s.done.Wait()
}

// Start starts the process as the leader of its own session and process group, unless c.Stays is
// set. The caller waits for the process.
func (s *Spawner) Start(ctx context.Context, c Command) (Process, error) {
	if err := c.Options.inProcess(); err != nil {
		return nil, err
	}
	if c.Held {
		return nil, errors.New("a process that waits for its start needs --runtime containerd")
	}
	start := s.startBeside
	if c.Chroot != "" {
		start = s.startInside
	}
	cmd, err := start(ctx, c)
	if err != nil {
		return nil, err
	}
	return spawned{cmd}, nil
}

// startBeside starts a process without a root of its own.
func (s *Spawner) startBeside(ctx context.Context, c Command) (*exec.Cmd, error) {
	cmd, err := c.cmd()
	if err == nil {
		err = s.run(ctx, cmd, c)
	}
	if errors.Is(err, unix.EACCES) && c.As != nil {
		err = fmt.Errorf("%w; it runs as a user of its own, want its files readable by all (chmod -R a+rX)", err)
	}
	if err != nil {
		return nil, fmt.Errorf("start %s in %s: %w", c.Args()[0], c.Dir, err)
	}
	return cmd, nil
}

// cmd returns the command of a process without a root of its own.
func (c Command) cmd() (*exec.Cmd, error) {
	argv := c.Args()
	program := argv[0]
	if strings.Contains(program, "/") && !filepath.IsAbs(program) {
		program = filepath.Join(c.Dir, program)
	}
	defaults := []string{"TMPDIR=" + Home}
	if dir := os.Getenv("GOCOVERDIR"); dir != "" { // coverage of a stage binary that was built for it
		defaults = append(defaults, "GOCOVERDIR="+dir)
	}
	var who []string
	var err error
	if c.As != nil {
		who = userVariables(userName(c.As.UID), Home)
	} else if who, err = starterVariables(); err != nil {
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
	// Shared memory that no process removes ends with the namespace.
	cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWIPC
	// The process gets no further groups.
	cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(c.As.UID), Gid: uint32(c.As.GID)}
	return cmd, nil
}

// run starts cmd from the Spawner's thread, in turn. The process ends when that thread ends.
func (s *Spawner) run(ctx context.Context, cmd *exec.Cmd, c Command) error {
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	started := make(chan error, 1)
	select {
	case s.jobs <- func() { started <- s.begin(cmd, c) }:
		return <-started
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.quit:
		return ErrClosed
	}
}

// begin starts cmd from the calling thread.
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
		leave, err := enterView(c, s.home.mounts)
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
	cmd.SysProcAttr.Ptrace = !s.untraced // so that the process stops before its first instruction
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
	if err := setLimits(cmd.Process.Pid, c, cmd.SysProcAttr.Ptrace); err != nil {
		_ = cmd.Process.Kill()
		wait(cmd)
		return err
	}
	return nil
}

// spawned is a process of a Spawner.
type spawned struct{ cmd *exec.Cmd }

// PID implements Process.
func (p spawned) PID() int { return p.cmd.Process.Pid }

// Signal implements Process.
func (p spawned) Signal(s syscall.Signal) error { return p.cmd.Process.Signal(s) }

// Wait implements Process.
func (p spawned) Wait() unix.WaitStatus { return wait(p.cmd) }

// Forget implements Process. The kernel has forgotten the process.
func (p spawned) Forget() {}

// wait waits until a process of a Spawner has ended, and returns how it ended. The caller calls
// wait once, in place of cmd.Wait. wait also kills the other processes of the process's group,
// because nothing else would end them.
func wait(cmd *exec.Cmd) unix.WaitStatus {
	err := error(unix.EINTR)
	for errors.Is(err, unix.EINTR) {
		err = unix.Waitid(unix.P_PID, cmd.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
	}
	if err == nil {
		// The process is not reaped yet, so no other group has its number.
		_ = unix.Kill(-cmd.Process.Pid, unix.SIGKILL)
	}
	_ = cmd.Wait() // the state says how the process ended
	if status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok {
		return unix.WaitStatus(status)
	}
	return 0
}

// Path is the PATH of processes whose environment has none. Home is their TMPDIR. It is also the
// HOME of processes that have their own /tmp and no other home folder.
const (
	Path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	Home = "/tmp"
)

// environment merges env over defaults and over the variables of every process. Each name appears
// once.
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
