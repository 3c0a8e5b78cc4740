// Command probe is the only program of an image in the tests. It prints what it finds around it.
package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"unsafe"
)

func main() {
	for _, arg := range os.Args[1:] {
		what, of, _ := strings.Cut(arg, "=")
		if err := say(what, of); err != nil {
			fmt.Printf("%s: %v\n", arg, err)
		}
	}
}

func say(what, of string) error {
	switch what {
	case "id":
		groups, err := os.Getgroups()
		fmt.Println("id:", os.Getuid(), os.Getgid(), groups, err)
	case "pid":
		all, err := filepath.Glob("/proc/[0-9]*")
		fmt.Println("pid:", os.Getpid(), all, err)
	case "env":
		fmt.Println("env:", strings.Join(os.Environ(), " "))
	case "dir":
		dir, err := os.Getwd()
		fmt.Println("dir:", dir, err)
	case "read":
		b, err := os.ReadFile(of)
		if err != nil {
			return err
		}
		fmt.Printf("read=%s: %s\n", of, bytes.TrimSpace(b))
	case "link":
		to, err := os.Readlink(of)
		if err != nil {
			to = "-"
		}
		fmt.Printf("link=%s: %s\n", of, to)
	case "list":
		entries, err := os.ReadDir(of)
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		fmt.Println("list:", of, names, err)
	case "stat":
		info, err := os.Stat(of)
		if err != nil {
			return err
		}
		fmt.Println("stat:", info.Mode())
	case "write":
		return os.WriteFile(of, []byte("x"), 0o644)
	case "status":
		b, err := os.ReadFile("/proc/self/status")
		if err != nil {
			return err
		}
		for line := range strings.Lines(string(b)) {
			if strings.HasPrefix(line, of+":") {
				fmt.Println(strings.Join(strings.Fields(line), " "))
			}
		}
	case "mknod":
		return syscall.Mknod(of, syscall.S_IFCHR|0o600, 1<<8|3)
	case "mount":
		return syscall.Mount("tmpfs", of, "tmpfs", 0, "")
	case "fd":
		n, err := strconv.Atoi(of)
		if err != nil {
			return err
		}
		_, err = os.NewFile(uintptr(n), "fd").WriteString("through the descriptor\n")
		return err
	case "kill", "ptrace":
		pid, err := strconv.Atoi(of)
		if err != nil {
			return err
		}
		if what == "kill" {
			return syscall.Kill(pid, syscall.SIGKILL)
		}
		runtime.LockOSThread()
		return syscall.PtraceAttach(pid)
	case "dial":
		c, err := net.Dial("unix", of)
		if err == nil {
			_ = c.Close()
		}
		return err
	case "limits":
		return limits()
	case "userns": // of a child process
		c := exec.Command("/proc/self/exe", "id")
		c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWUSER}
		return c.Run()
	case "unshare":
		return syscall.Unshare(syscall.CLONE_NEWUSER)
	case "child":
		return exec.Command("/proc/self/exe", "id").Run()
	case "keys":
		// Ask for the keys of its user.
		if _, _, err := syscall.Syscall(syscall.SYS_KEYCTL, 0, ^uintptr(3), 1); err != 0 {
			return err
		}
	case "death":
		return death()
	case "temp":
		f, err := os.CreateTemp("", "")
		if err != nil {
			return err
		}
		info, err := os.Stat(os.TempDir())
		fmt.Println("temp:", filepath.Dir(f.Name()), info.Mode(), err)
	case "bomb":
		return bomb()
	case "sealed": // against other processes of its user, as package stage/zygote does it
		if _, _, err := syscall.Syscall(syscall.SYS_PRCTL, syscall.PR_SET_DUMPABLE, 0, 0); err != 0 {
			return err
		}
	case "wait":
		end := make(chan os.Signal, 1)
		signal.Notify(end, syscall.SIGTERM)
		fmt.Println("waiting")
		fmt.Println(<-end)
	}
	return nil
}

func limits() error {
	for name, n := range map[string]int{"core": syscall.RLIMIT_CORE, "fsize": syscall.RLIMIT_FSIZE, "nproc": 6} {
		var l syscall.Rlimit
		if err := syscall.Getrlimit(n, &l); err != nil {
			return err
		}
		fmt.Println("limit:", name, l.Cur, l.Max)
	}
	b, err := os.ReadFile("/proc/self/limits") // a Go program raises its own limit
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 4 && f[1] == "open" {
			fmt.Println("limit: files", f[4])
		}
	}
	return err
}

// death reports which signal this process gets when its parent ends.
func death() error {
	var s int32
	if _, _, err := syscall.RawSyscall(syscall.SYS_PRCTL, syscall.PR_GET_PDEATHSIG, uintptr(unsafe.Pointer(&s)), 0); err != 0 {
		return err
	}
	fmt.Println("death:", s)
	return nil
}

// bomb starts processes in their own sessions that do the same, until a start fails, and prints the
// error.
func bomb() error {
	for {
		c := exec.Command("/proc/self/exe", "bomb")
		c.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
		if err := c.Start(); err != nil {
			if os.Getenv("QUIET") == "" {
				fmt.Println("bomb:", err)
			}
			end := make(chan os.Signal, 1)
			signal.Notify(end, syscall.SIGTERM)
			<-end
			return nil
		}
	}
}
