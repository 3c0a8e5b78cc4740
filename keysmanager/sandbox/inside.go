package sandbox

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// InitCommand is the first argument of this program when it runs as an init process: the first
// process in a new root. The init process prepares the root and then becomes the wanted program. So
// if a program starts processes with a root of their own, and finds InitCommand as its own first
// argument, it must call [Init] with the remaining arguments.
const InitCommand = "sandbox-init"

// Bind makes a file or folder of the machine appear in the root of a process: read-only, without
// devices and set-user-ID bits.
type Bind struct {
	From string
	To   string // absolute, in the process's root; created if it is missing
	// Copy says that From is a folder of small files, such as secrets. The process sees a copy in
	// memory, which belongs to the process's user.
	Copy bool
}

// inside is the message that tells an init process what to do.
type inside struct {
	Root     string
	Dir      string
	Argv     []string
	Env      []string
	User     string
	Binds    []Bind
	Names    []Bind // /etc/hosts and /etc/resolv.conf
	GPUs     bool
	ReadOnly bool
	Options  Options
	Zone     zone
}

// The Spawner and an init process talk over a socket:
//   - the Spawner sends an inside as one line of JSON
//   - the init process sends ready when only the exec of the program is left
//   - the Spawner sends go
//   - the init process becomes the program, which closes the socket
//
// A line that begins with ! is the reason for a failure.
const (
	sayReady = "ready"
	sayGo    = "go"
	sayFault = "!"
)

// initTimeout bounds the time of an init process.
const initTimeout = 30 * time.Second

// startInside starts a process that has c.Chroot as its root.
func (s *Spawner) startInside(ctx context.Context, c Command) (*exec.Cmd, error) {
	root, err := filepath.Abs(c.Chroot)
	if err != nil {
		return nil, fmt.Errorf("root %s: %w", c.Chroot, err)
	}
	in := inside{
		Root: root, Dir: c.Dir, Argv: c.Args(), Env: environment(c.Env, []string{"TMPDIR=/tmp"}), User: c.User, Binds: c.Binds, GPUs: c.GPUs, ReadOnly: c.ReadOnly,
		Options: c.Options, Zone: machineZone(),
	}
	for _, n := range c.names() {
		in.Names = append(in.Names, Bind{From: cmp.Or(n.from, n.at), To: n.at})
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket of an init process: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "init"), os.NewFile(uintptr(fds[1]), "init")
	defer ours.Close()
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, fmt.Errorf("socket of an init process: %w", err)
	}
	defer conn.Close()

	cmd := exec.Command("/proc/self/exe", InitCommand, strconv.Itoa(3+len(c.Files)))
	cmd.ExtraFiles = append(slices.Clone(c.Files), theirs)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = c.stdin(), c.Stdout, c.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid: true, Pdeathsig: syscall.SIGKILL, Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC,
	}
	if err := s.run(ctx, cmd, c); err != nil {
		if errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("%w: an image with a root of its own needs namespaces, want the capability SYS_ADMIN (run as root)", err)
		}
		return nil, fmt.Errorf("start %s in root %s: %w", in.Argv[0], root, err)
	}
	_ = theirs.Close()
	if err := awaitProgram(ctx, conn, in); err != nil {
		_ = cmd.Process.Kill()
		wait(cmd)
		return nil, fmt.Errorf("start %s in root %s: %w", in.Argv[0], root, err)
	}
	return cmd, nil
}

// awaitProgram talks to an init process. It returns nil once the program runs.
func awaitProgram(ctx context.Context, conn net.Conn, in inside) (err error) {
	if err := conn.SetDeadline(time.Now().Add(initTimeout)); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	defer func() {
		if err != nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
	}()
	b, err := json.Marshal(in)
	if err != nil {
		return err
	}
	if _, err := conn.Write(append(b, '\n')); err != nil {
		return fmt.Errorf("its init process ended early: %w", err)
	}
	lines := bufio.NewScanner(conn)
	if !lines.Scan() {
		if lines.Err() != nil {
			return fmt.Errorf("its init process: %w", lines.Err())
		}
		return errors.New("its init process ended early")
	}
	if fault, ok := strings.CutPrefix(lines.Text(), sayFault); ok {
		return errors.New(fault)
	}
	if lines.Text() != sayReady {
		return fmt.Errorf("its init process says %q, want %s: is this program's %s command handled?", lines.Text(), sayReady, InitCommand)
	}
	if _, err := conn.Write([]byte(sayGo + "\n")); err != nil {
		return fmt.Errorf("its init process ended early: %w", err)
	}
	if lines.Scan() {
		return errors.New(strings.TrimPrefix(lines.Text(), sayFault))
	}
	return lines.Err() // nil: exec closed the socket
}

// Init runs the init process of a root, in the namespaces of the new process. It makes the root,
// gives up its rights and becomes the program. Init returns only if it fails, after it has sent the
// reason to the Spawner.
func Init(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("%s: got %d arguments, want a descriptor; only a Spawner runs it", InitCommand, len(args))
	}
	fd, err := strconv.Atoi(args[0])
	if err != nil || fd < 3 {
		return fmt.Errorf("%s: descriptor %q, want a number from 3 on", InitCommand, args[0])
	}
	unix.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), "spawner")
	conn, err := net.FileConn(f)
	_ = f.Close() // FileConn has duplicated it
	if err != nil {
		return fmt.Errorf("%s: descriptor %d: %w", InitCommand, fd, err)
	}
	err = become(conn)
	// If the write fails, the Spawner has ended, and nobody else reads the reason.
	_, _ = conn.Write([]byte(sayFault + strings.ReplaceAll(err.Error(), "\n", " ") + "\n"))
	return err
}

func become(conn net.Conn) error {
	r := bufio.NewReader(conn)
	line, err := r.ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("its spawner has gone: %w", err)
	}
	var in inside
	if err := json.Unmarshal(line, &in); err != nil {
		return err
	}
	who, err := enter(in)
	if err != nil {
		return err
	}
	env := in.Env
	for _, variable := range userVariables(who.name, who.home) {
		name, _, _ := strings.Cut(variable, "=")
		if !slices.ContainsFunc(in.Env, func(e string) bool { return strings.HasPrefix(e, name+"=") }) {
			env = append(env, variable)
		}
	}
	program, err := find(in.Argv[0], env)
	if err != nil {
		return err
	}
	// Locks this goroutine's thread, which becomes the program.
	if err := dropRights(who, in.Options.kept()); err != nil {
		return err
	}
	if _, err := conn.Write([]byte(sayReady + "\n")); err != nil {
		return err
	}
	if _, err := r.ReadBytes('\n'); err != nil { // the Spawner ended before its end could be signalled
		return fmt.Errorf("its spawner has gone: %w", err)
	}
	return fmt.Errorf("%s: %w", program, syscall.Exec(program, in.Argv, env))
}

var errNoProgram = errors.New("not in the image's PATH")

// find looks for a program in the folders of PATH, in the present root.
func find(program string, env []string) (string, error) {
	if strings.Contains(program, "/") {
		return program, nil // exec reports what is wrong with it
	}
	for _, e := range env {
		path, ok := strings.CutPrefix(e, "PATH=")
		for _, dir := range filepath.SplitList(path) {
			if file := filepath.Join(dir, program); ok && executable(file) {
				return file, nil
			}
		}
	}
	return "", fmt.Errorf("%s: %w", program, errNoProgram)
}
