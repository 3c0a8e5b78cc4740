package sandbox

import (
	"bufio"
	"cmp"
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

// InitCommand is the argument by which a program that starts processes with a root of their own is run again as their
// first half: it has to call [Init] with the arguments that follow.
const InitCommand = "sandbox-init"

// Bind makes a file or folder of ours appear in the root of a process: read-only, without devices and set-user-ID bits.
type Bind struct {
	From string
	To   string // absolute, in the process's root; made there when it is missing
	Copy bool   // a folder of small files, such as secrets: what appears is a copy in memory that belongs to the process's user
}

// inside is what the first half of a process with a root of its own is told.
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
}

// The conversation of a Spawner and a first half, in lines: the inside as JSON; ready, when nothing is left but to become
// the program; go; then the socket closes because the program runs. A line that begins with ! is why it does not.
const (
	sayReady = "ready"
	sayGo    = "go"
	sayFault = "!"
)

// initTimeout bounds how long a first half may take.
const initTimeout = 30 * time.Second

// startInside starts a process that has c.Chroot as its root.
func (s *Spawner) startInside(c Command) (*exec.Cmd, error) {
	root, err := filepath.Abs(c.Chroot)
	if err != nil {
		return nil, fmt.Errorf("root %s: %w", c.Chroot, err)
	}
	in := inside{
		Root: root, Dir: c.Dir, Argv: c.argv(), Env: environment(c.Env, []string{"TMPDIR=/tmp"}), User: c.User, Binds: c.Binds, GPUs: c.GPUs, ReadOnly: c.ReadOnly,
	}
	for _, n := range c.names() {
		in.Names = append(in.Names, Bind{From: cmp.Or(n.from, n.at), To: n.at})
	}
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket of a first half: %w", err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "init"), os.NewFile(uintptr(fds[1]), "init")
	defer ours.Close()
	defer theirs.Close()
	conn, err := net.FileConn(ours)
	if err != nil {
		return nil, fmt.Errorf("socket of a first half: %w", err)
	}
	defer conn.Close()

	cmd := exec.Command("/proc/self/exe", InitCommand, strconv.Itoa(3+len(c.Files)))
	cmd.ExtraFiles = append(slices.Clone(c.Files), theirs)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = c.stdin(), c.Stdout, c.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid: true, Pdeathsig: syscall.SIGKILL, Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC,
	}
	if err := s.run(cmd, c); err != nil {
		if errors.Is(err, unix.EPERM) {
			err = fmt.Errorf("%w: an image with a root of its own needs namespaces, want the capability SYS_ADMIN (run as root)", err)
		}
		return nil, fmt.Errorf("start %s in root %s: %w", in.Argv[0], root, err)
	}
	_ = theirs.Close()
	if err := converse(conn, in); err != nil {
		_ = cmd.Process.Kill()
		Wait(cmd)
		return nil, fmt.Errorf("start %s in root %s: %w", in.Argv[0], root, err)
	}
	return cmd, nil
}

// converse returns when the program runs, or says why it does not.
func converse(conn net.Conn, in inside) error {
	if err := conn.SetDeadline(time.Now().Add(initTimeout)); err != nil {
		return err
	}
	b, err := json.Marshal(in)
	if err != nil {
		return err
	}
	if _, err := conn.Write(append(b, '\n')); err != nil {
		return fmt.Errorf("its first half ended early: %w", err)
	}
	lines := bufio.NewScanner(conn)
	if !lines.Scan() {
		if lines.Err() != nil {
			return fmt.Errorf("its first half: %w", lines.Err())
		}
		return errors.New("its first half ended early")
	}
	if fault, ok := strings.CutPrefix(lines.Text(), sayFault); ok {
		return errors.New(fault)
	}
	if lines.Text() != sayReady {
		return fmt.Errorf("its first half says %q, want %s: is this program's %s command handled?", lines.Text(), sayReady, InitCommand)
	}
	if _, err := conn.Write([]byte(sayGo + "\n")); err != nil {
		return fmt.Errorf("its first half ended early: %w", err)
	}
	if lines.Scan() {
		return errors.New(strings.TrimPrefix(lines.Text(), sayFault))
	}
	return lines.Err() // nil: closed by the exec
}

// Init is the first half of a process with a root of its own: it runs in the process's namespaces, makes the root, gives up
// its rights and becomes the program. It returns only when it cannot; the Spawner knows why then.
func Init(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("%s: got %d arguments, want a descriptor; it is not for people", InitCommand, len(args))
	}
	fd, err := strconv.Atoi(args[0])
	if err != nil || fd < 3 {
		return fmt.Errorf("%s: descriptor %q, want a number from 3 on", InitCommand, args[0])
	}
	unix.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), "spawner")
	conn, err := net.FileConn(f)
	_ = f.Close() // FileConn has its own
	if err != nil {
		return fmt.Errorf("%s: descriptor %d: %w", InitCommand, fd, err)
	}
	err = become(conn)
	_, _ = conn.Write([]byte(sayFault + strings.ReplaceAll(err.Error(), "\n", " ") + "\n")) // nobody is left to be told otherwise
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
	for _, variable := range named(who.name, who.home) {
		name, _, _ := strings.Cut(variable, "=")
		if !slices.ContainsFunc(in.Env, func(e string) bool { return strings.HasPrefix(e, name+"=") }) {
			env = append(env, variable)
		}
	}
	program, err := find(in.Argv[0], env)
	if err != nil {
		return err
	}
	if err := surrender(who); err != nil { // locks this goroutine's thread: the one that becomes the program
		return err
	}
	if _, err := conn.Write([]byte(sayReady + "\n")); err != nil {
		return err
	}
	if _, err := r.ReadBytes('\n'); err != nil { // it died before its death could be heard of
		return fmt.Errorf("its spawner has gone: %w", err)
	}
	return fmt.Errorf("%s: %w", program, syscall.Exec(program, in.Argv, env))
}

var errNoProgram = errors.New("not in the image's PATH")

// find looks a program up in the folders of PATH, in the present root.
func find(program string, env []string) (string, error) {
	if strings.Contains(program, "/") {
		return program, nil // exec says what is wrong with it
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
