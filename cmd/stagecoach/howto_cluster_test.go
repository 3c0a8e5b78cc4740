package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/internal/netnstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// clusterPage is the page that TestHowtoCluster runs.
const clusterPage = "howto-cluster.md"

// clusterMachines are the names of the page's machines. Their addresses on the page are 10.0.0.1
// and so on.
var clusterMachines = []string{"a", "b", "c", "d"}

// TestHowtoCluster runs the page about a cluster as a reader does. Each machine is a network
// namespace with a folder of its own, and lets through only the ports in the page's table. A block
// says on which machines it runs. CLUSTER_TEST=full runs the whole page; make test-cluster sets it.
// Otherwise, the page ends at shortEnd.
func TestHowtoCluster(t *testing.T) {
	b, err := os.ReadFile("../../docs/" + clusterPage)
	if err != nil {
		t.Fatal(err)
	}
	t.Parallel()
	text := string(b)
	c := newClusterReader(t, text)
	if os.Getenv("CLUSTER_TEST") != "full" {
		var ok bool
		if text, _, ok = strings.Cut(text, shortEnd); !ok {
			t.Fatalf("the page lacks %q", shortEnd)
		}
	}
	for _, e := range examples(t, text) {
		begun := time.Now()
		for _, name := range e.on {
			c.run(name, e)
		}
		t.Logf("line %d: %v", e.line, time.Since(begun).Round(time.Millisecond))
	}
}

// shortEnd begins the part of the page that only make test-cluster runs.
const shortEnd = "\n## Loss of a machine\n"

// clusterReader runs the examples of a page on several machines.
type clusterReader struct {
	t      *testing.T
	folder string // has a folder per machine, named by its address
	on     map[string]*netnstest.Machine
	here   *strings.Replacer // replaces the addresses of the page
	there  *strings.Replacer // and back
}

// newClusterReader makes the machines of a page.
func newClusterReader(t *testing.T, page string) *clusterReader {
	t.Helper()
	_, machines := netnstest.New(t, len(clusterMachines))
	folder := t.TempDir()
	c := &clusterReader{t: t, folder: folder, on: map[string]*netnstest.Machine{}}
	base := filepath.Clean(cmp.Or(os.Getenv("GOTMPDIR"), os.TempDir()))
	for at := folder; at != base; at = filepath.Dir(at) {
		if !strings.HasPrefix(at, strings.TrimSuffix(base, "/")+"/") {
			t.Fatalf("the test's folder is %s, want one below %s", folder, base)
		}
		if err := os.Chmod(at, 0o755); err != nil { //nolint:gosec // functions are users of their own
			t.Fatal(err)
		}
	}
	var here, there []string
	ports := portsOf(t, page)
	for i, name := range clusterMachines {
		m, address := machines[i], fmt.Sprintf("10.0.0.%d", i+1)
		c.on[name] = m
		here, there = append(here, address, m.IP), append(there, m.IP, address)
		m.Allow(ports[name]...)
		if err := os.MkdirAll(c.home(m), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	c.here, c.there = strings.NewReplacer(here...), strings.NewReplacer(there...)
	c.programs()
	t.Cleanup(c.end)
	return c
}

var portRow = regexp.MustCompile(`(?m)^\| (\d+) \| [^|]+ \| ([^|]+) \|`)

// portsOf returns the ports of the page's table by machine.
func portsOf(t *testing.T, page string) map[string][]uint16 {
	t.Helper()
	out := map[string][]uint16{}
	for _, row := range portRow.FindAllStringSubmatch(page, -1) {
		port, err := strconv.ParseUint(row[1], 10, 16)
		if err != nil {
			t.Fatal(err)
		}
		for name := range strings.SplitSeq(row[2], ", ") {
			if !slices.Contains(clusterMachines, name) {
				t.Fatalf("port %d of machine %q, want one of %q", port, name, clusterMachines)
			}
			out[name] = append(out[name], uint16(port))
		}
	}
	if len(out) != len(clusterMachines) {
		t.Fatalf("the table has ports of the machines %v, want of all", out)
	}
	return out
}

// home returns the folder of a machine.
func (c *clusterReader) home(m *netnstest.Machine) string { return filepath.Join(c.folder, m.IP) }

// programs writes the programs that a reader needs beside those of the system.
func (c *clusterReader) programs() {
	c.t.Helper()
	self, err := os.Executable()
	bin := filepath.Join(c.folder, "bin")
	if err == nil {
		err = os.Mkdir(bin, 0o755)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	natstest.Program(c.t, filepath.Join(bin, "nats-server"))
	// All machines have one kernel, so a node has to say that it is on another one.
	const stagecoach = `[ "$1" != keysmanager ] || set -- "$@" --remote
exec env %s=1 %q "$@"`
	// scp -pr FILE... HOST:FILE
	const scp = `to=${!#}
exec cp -a "${@:2:$#-2}" %q/"${to%%%%:*}/${to#*:}"`
	for name, text := range map[string]string{
		"stagecoach": fmt.Sprintf(stagecoach, actAsMain, self),
		"scp":        fmt.Sprintf(scp, c.folder),
	} {
		text = "#!/bin/bash\n" + text + "\n"
		err := os.WriteFile(filepath.Join(bin, name), []byte(text), 0o755) //nolint:gosec // a program
		if err != nil {
			c.t.Fatal(err)
		}
	}
}

// run runs an example on a machine, in a shell of its own.
func (c *clusterReader) run(name string, e example) {
	t := c.t
	t.Helper()
	m := c.on[name]
	if m == nil {
		t.Fatalf("line %d: machine %q, want on=NAME with names of %q", e.line, name, clusterMachines)
	}
	ctx, cancel := context.WithTimeout(t.Context(), late)
	defer cancel()
	const shell = `hostname "$0"; exec bash -euo pipefail -c "$1"`
	cmd := m.Command("unshare", "--uts", "bash", "-c", shell, name, c.here.Replace(e.code))
	cmd.Dir = c.home(m)
	cmd.Env = append(os.Environ(), "HOME="+cmd.Dir, "PATH="+filepath.Join(c.folder, "bin")+":"+os.Getenv("PATH"))
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	err := cmd.Start()
	if err == nil {
		stop := context.AfterFunc(ctx, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
		err = cmd.Wait()
		stop()
	}
	if err != nil {
		t.Fatalf("line %d, on %s: %v\n%s\nprinted:\n%s%s", e.line, name, err, e.code, stdout.String(), stderr.String())
	}
	if got := c.there.Replace(stdout.String()); !matches(e.output, got) {
		t.Errorf("line %d, on %s:\n%s\nprinted:\n%s\nwant:\n%s", e.line, name, e.code, got, e.output)
	}
}

// end stops the processes of all machines, the nodes first. None may be left.
func (c *clusterReader) end() {
	t := c.t
	for _, file := range []string{"node.pid", "up.pid", "nats/nats.pid"} {
		var stopped []int
		for _, m := range c.on {
			b, err := os.ReadFile(filepath.Join(c.home(m), file))
			if err != nil {
				continue // no such process has begun
			}
			pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
			if err != nil {
				t.Errorf("%s: %v", file, err)
			} else if slices.Contains(m.Processes(), pid) {
				stopped = append(stopped, pid)
				_ = syscall.Kill(pid, syscall.SIGTERM) // it may end by itself
			}
		}
		proctest.Until(t, "the processes of "+file+" to end", func() bool {
			return !slices.ContainsFunc(stopped, func(pid int) bool { _, err := readProcess(pid); return err == nil })
		})
	}
	for name, m := range c.on {
		for _, pid := range m.Processes() {
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // it may have ended
			t.Errorf("process %d is left on %s: %q", pid, name, line)
			_ = syscall.Kill(pid, syscall.SIGKILL)
		}
		logs, _ := filepath.Glob(c.home(m) + "/*.log") // the pattern is good
		for _, file := range logs {
			if b, err := os.ReadFile(file); err == nil && (t.Failed() || crashed(string(b))) {
				t.Errorf("the end of %s on %s:\n%s", filepath.Base(file), name, b[max(0, len(b)-6000):])
			}
		}
	}
}
