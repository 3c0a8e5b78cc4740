// Command probe is the only program of an image in the tests: it says what it finds around it.
package main

import (
	"bytes"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
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
	case "list":
		entries, err := os.ReadDir(of)
		var names []string
		for _, e := range entries {
			names = append(names, e.Name())
		}
		fmt.Println("list:", of, names, err)
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
	case "wait":
		end := make(chan os.Signal, 1)
		signal.Notify(end, syscall.SIGTERM)
		fmt.Println("waiting")
		fmt.Println(<-end)
	}
	return nil
}
