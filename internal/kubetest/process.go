package kubetest

import (
	_ "embed"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/netnstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

//go:embed control.sh
var controlScript string

//go:embed node.sh
var nodeScript string

// process is a shell in its own namespaces of process ids and mounts, and all that it starts.
type process struct {
	cmd *exec.Cmd
	dir string // of its logs
}

// run starts a script on a machine. If this process is killed, the kernel ends unshare, and
// therefore the namespace with everything in it.
func (c *Cluster) run(m *netnstest.Machine, dir, script string, env ...string) *process {
	c.t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		c.t.Fatal(err)
	}
	log, err := os.Create(filepath.Join(dir, "script.log"))
	if err != nil {
		c.t.Fatal(err)
	}
	defer log.Close()
	cmd := m.Command("unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-euc", script)
	cmd.Env = append(os.Environ(), append(env, "BIN="+c.bin, "RUN="+c.dir, "DIR="+dir, "IP="+m.IP, "SERVER="+c.Server)...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
	if err := proctest.Start(cmd); err != nil {
		c.t.Fatal(err)
	}
	p := &process{cmd: cmd, dir: dir}
	c.t.Cleanup(func() {
		p.kill(c.t)
		if c.t.Failed() {
			p.logs(c.t)
		}
	})
	return p
}

// kill ends the namespace, and returns when nothing of it is left.
func (p *process) kill(t testing.TB) {
	t.Helper()
	if p.cmd.ProcessState != nil {
		return
	}
	// unshare waits for the shell, which the kernel reaps after all others of its namespace.
	shells := proctest.Children(t, p.cmd.Process.Pid)
	for _, shell := range shells {
		_ = syscall.Kill(shell, syscall.SIGKILL) // it may have ended
	}
	if len(shells) == 0 { // unshare has not forked yet, or the shell has ended
		_ = p.cmd.Process.Kill()
	}
	_ = p.cmd.Wait() // killed
}

// logs shows the end of each log.
func (p *process) logs(t testing.TB) {
	t.Helper()
	all, _ := filepath.Glob(filepath.Join(p.dir, "*.log"))
	for _, path := range all {
		b, _ := os.ReadFile(path)
		lines := strings.Split(strings.TrimSpace(string(b)), "\n")
		lines = lines[max(0, len(lines)-30):]
		for i, l := range lines {
			lines[i] = l[:min(len(l), 400)]
		}
		t.Logf("%s:\n%s", filepath.Join(filepath.Base(p.dir), filepath.Base(path)), strings.Join(lines, "\n"))
	}
}

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
