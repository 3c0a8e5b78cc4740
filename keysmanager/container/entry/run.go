package entry

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// killed is the exit status of a container whose Runtime has gone.
const killed = 128 + int(unix.SIGKILL)

// First arguments of stagecoach-init, in place of those of the first program of a container of
// containerd.
const (
	// PodCommand makes it the first program of a pod of Kubernetes. The socket may appear later than
	// the program. The program gets no signals from the pod: its Runtime hears of the pod's end, too.
	PodCommand = "pod"
	// CopyCommand makes it copy itself to the path that is its second argument.
	CopyCommand = "copy"
)

// Main is the program stagecoach-init: the first program of a container, or a hook. It never
// returns.
func Main() {
	var command string
	if len(os.Args) > 1 {
		command = os.Args[1]
	}
	var err error
	switch command {
	case EnterGroups:
		err = enterGroups(os.Stdin, os.Args[2:])
	case CopyCommand:
		err = copyTo(os.Args[2:])
	default:
		run(command == PodCommand)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err) // which the runtime passes on
		os.Exit(1)
	}
	os.Exit(0)
}

// copyTo copies this program.
func copyTo(to []string) error {
	if len(to) != 1 {
		return fmt.Errorf("%s %q, want one path", CopyCommand, to)
	}
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	return os.WriteFile(to[0], b, 0o755) //nolint:gosec // it is a program
}

// Waits of a pod's first program for its socket.
const (
	socketLate  = 2 * time.Minute
	socketPause = 5 * time.Millisecond
)

// dial connects to the Runtime. In a pod, it waits for the socket.
func dial(pod bool) (*net.UnixConn, error) {
	for begin := time.Now(); ; time.Sleep(socketPause) {
		conn, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: filepath.Join(Folder, Socket), Net: "unixpacket"})
		if err == nil || !pod || time.Since(begin) > socketLate {
			return conn, err
		}
	}
}

// run is the first program of a container. It never returns.
func run(pod bool) {
	makeThreads()
	// The program has the same user. It must not look into this process, nor take its socket.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		os.Exit(fail(nil, fmt.Errorf("undumpable: %w", err)))
	}
	signals := hear()
	conn, err := dial(pod)
	if err != nil {
		os.Exit(fail(nil, err))
	}
	pid, err := begin(conn)
	if errors.Is(err, errRoom) {
		os.Exit(newRoom().run(conn, signals))
	}
	if err != nil {
		os.Exit(fail(conn, err))
	}
	go func() { // ends with this process
		_, _ = conn.Read(make([]byte, 1)) // nothing is sent: it returns when the Runtime has gone
		os.Exit(killed)
	}()
	os.Exit(reap(conn, pid, signals, pod))
}

// hear returns this process's signals. SIGCHLD wakes the loop of reap. None is ignored, because the
// programs would inherit that.
func hear() <-chan os.Signal {
	signals := make(chan os.Signal, 64)
	signal.Notify(signals)
	return signals
}

// threads is more than the number of goroutines of this program and of its libraries.
const threads = 8

// makeThreads makes threads, which Go keeps for later. When the program has used up its limit on
// processes and threads, which may be that of this process, too, Go would end this process if it
// needed another one.
func makeThreads() {
	var running, done sync.WaitGroup
	end := make(chan struct{})
	for range threads {
		running.Add(1)
		done.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			running.Done()
			<-end
		})
	}
	running.Wait()
	close(end)
	done.Wait()
}

// fail reports why the program does not run, and returns an exit status.
func fail(conn *net.UnixConn, err error) int {
	if conn != nil {
		tell(conn, said{Fault: err.Error()})
	}
	return 1
}

func tell(conn *net.UnixConn, s said) {
	b, err := json.Marshal(s)
	if err == nil {
		_, _ = conn.Write(b) // if the Runtime has gone, nobody reads it
	}
}

// begin receives what to run, starts it, and returns its number when the Runtime knows that.
func begin(conn *net.UnixConn) (pid int, err error) {
	w, fds, err := receive(conn)
	if err != nil {
		return 0, err
	}
	pid, err = start(w, fds)
	closeAll(fds)
	if err != nil {
		return 0, err
	}
	tell(conn, said{PID: pid})
	if _, err := conn.Read(make([]byte, maxSaid)); err != nil {
		return 0, err
	}
	return pid, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// receive receives what to run, and its descriptors. The error is errRoom if nothing is to run.
func receive(conn *net.UnixConn) (w Wanted, fds []int, err error) {
	buf, oob := make([]byte, maxMessage+1), make([]byte, unix.CmsgSpace(4*maxFiles))
	n, oobn, flags, _, err := conn.ReadMsgUnix(buf, oob)
	if err != nil {
		return w, nil, err
	}
	if fds, err = files(oob[:oobn]); err != nil {
		return w, nil, fmt.Errorf("descriptors: %w", err)
	}
	if n > maxMessage || flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0 {
		err = fmt.Errorf("a message above %d bytes or %d descriptors, want less", maxMessage, maxFiles)
	} else {
		w, err = decode(buf[:n])
	}
	if err != nil {
		closeAll(fds)
	}
	return w, fds, err
}

// start starts the program with these descriptors.
func start(w Wanted, fds []int) (pid int, err error) {
	if len(w.Argv) == 0 {
		return 0, errors.New("no program is named")
	}
	program := w.Program
	if program == "" {
		if program, err = find(w.Argv[0], w.Env); err != nil {
			return 0, err
		}
	}
	all, next := make([]uintptr, len(w.Open)), 0
	for i, open := range w.Open {
		switch {
		case !open:
			all[i] = ^uintptr(0) // closed
		case next < len(fds):
			all[i] = uintptr(fds[next])
			next++
		default:
			return 0, fmt.Errorf("%d descriptors, want more", len(fds))
		}
	}
	pid, err = syscall.ForkExec(program, w.Argv, &syscall.ProcAttr{Dir: w.Dir, Env: w.Env, Files: all, Sys: &syscall.SysProcAttr{Setsid: true}})
	if err != nil {
		// The kernel gives the same error for a folder as for a program.
		if folder := unix.Access(w.Dir, unix.X_OK); folder != nil {
			return 0, fmt.Errorf("folder %s: %w", w.Dir, folder)
		}
		return 0, fmt.Errorf("fork/exec %s: %w", program, err)
	}
	return pid, nil
}

// find looks for a program in the folders of PATH.
func find(program string, env []string) (string, error) {
	if strings.Contains(program, "/") {
		return program, nil // exec reports what is wrong with it
	}
	for _, e := range env {
		path, ok := strings.CutPrefix(e, "PATH=")
		for _, dir := range filepath.SplitList(path) {
			file := filepath.Join(dir, program)
			if info, err := os.Stat(file); ok && err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
				return file, nil
			}
		}
	}
	return "", fmt.Errorf("%s: not in the image's PATH", program)
}

// reap reaps children until the program has ended, and returns the exit status of the container. It
// hands on signals, but not in a pod: there, they are the kubelet's, and the Runtime decides.
func reap(conn *net.UnixConn, program int, signals <-chan os.Signal, pod bool) int {
	for {
		for {
			var status unix.WaitStatus
			pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
			if errors.Is(err, unix.EINTR) {
				continue
			}
			if err != nil || pid == 0 {
				break
			}
			if pid != program {
				continue
			}
			tell(conn, said{Ended: true, Status: uint32(status)})
			if status.Signaled() {
				return 128 + int(status.Signal())
			}
			return status.ExitStatus()
		}
		s, ok := (<-signals).(syscall.Signal)
		// Go uses SIGURG itself.
		if ok && !pod && s != unix.SIGCHLD && s != unix.SIGURG && s != unix.SIGPIPE {
			_ = unix.Kill(program, s) // it may have just ended
		}
	}
}
