// Command hostile is a function that attacks: it carries out the orders in its input, one per line, and says
// after each what came of it. It runs once per request.
package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// patience bounds one attempt to reach somebody.
const patience = 5 * time.Second

func main() {
	orders := bufio.NewScanner(os.Stdin)
	for orders.Scan() {
		verb, what, _ := strings.Cut(orders.Text(), " ")
		fmt.Printf("%s: %s\n", orders.Text(), carryOut(verb, what))
	}
}

func carryOut(verb, what string) string {
	switch verb {
	case "tcp", "unix":
		return reached(net.DialTimeout(verb, what, patience))
	case "abstract":
		return reached(net.DialTimeout("unix", "@"+what, patience))
	case "get":
		client := http.Client{Timeout: patience}
		resp, err := client.Get(what)
		if err != nil {
			return err.Error()
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(io.LimitReader(resp.Body, 4096))
		return fmt.Sprintf("%d %q", resp.StatusCode, b)
	case "async": // URL and, after a space, that of the callback
		url, callback, _ := strings.Cut(what, " ")
		req, err := http.NewRequest(http.MethodPost, url, strings.NewReader("x"))
		if err != nil {
			return err.Error()
		}
		req.Header.Set("X-Callback-Url", callback)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			return err.Error()
		}
		_ = resp.Body.Close()
		return resp.Status
	case "read":
		b, err := os.ReadFile(what)
		if err != nil {
			return err.Error()
		}
		return fmt.Sprintf("%q", b)
	case "list":
		entries, err := os.ReadDir(what)
		if err != nil {
			return err.Error()
		}
		return fmt.Sprint(entries)
	case "commands":
		return commands()
	case "raw":
		_, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
		return fmt.Sprint(err)
	case "forks":
		return forks(what)
	case "memory":
		return memory(what)
	case "fill":
		return fill(what)
	}
	return "an unknown order"
}

func reached(c net.Conn, err error) string {
	if err != nil {
		return err.Error()
	}
	_ = c.Close()
	return "reached"
}

// commands returns the command lines of all processes that it sees, its own last.
func commands() string {
	var out []string
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range files {
		b, _ := os.ReadFile(file)
		out = append(out, strings.ReplaceAll(string(b), "\x00", " "))
	}
	return fmt.Sprintf("%q", out)
}

// forks has a shell start many processes that stay for a moment. This process itself must need no more threads meanwhile.
func forks(count string) string {
	debug.SetGCPercent(-1)
	cmd := exec.Command("sh", "-c", "i=0; while [ $i -lt "+count+" ]; do sleep 600 >/dev/null 2>&1 & i=$((i+1)); done")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	b, err := cmd.CombinedOutput()
	if cmd.Process != nil {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // the sleeps
	}
	return fmt.Sprintf("%q %v", b, err)
}

// memory writes to so many MiB.
func memory(mib string) string {
	n, _ := strconv.Atoi(mib)
	var kept [][]byte
	for range n {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		kept = append(kept, b)
	}
	return fmt.Sprintf("%d", len(kept))
}

// fill writes a file until it cannot grow, and removes it.
func fill(path string) string {
	f, err := os.Create(path)
	if err != nil {
		return err.Error()
	}
	defer os.Remove(path)
	block, n := make([]byte, 1<<20), 0
	for n < 4<<10 {
		if _, err = f.Write(block); err != nil {
			break
		}
		n++
	}
	return fmt.Sprintf("%d MiB, then %v", n, err)
}
