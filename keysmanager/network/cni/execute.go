package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

// wait bounds how long plugins may take for one ADD, or one DEL.
const wait = 20 * time.Second

// maxWords bounds how much of what a failed plugin has printed is shown, in bytes.
const maxWords = 1 << 10

// executor runs plugins as libcni's own executor does, with two differences: it kills a plugin that
// hangs together with the programs that it has started, and plugins end with this process.
type executor struct {
	invoke.RawExec // finds plugins
	version.PluginDecoder
	wait time.Duration // for error texts
}

// ExecPlugin implements invoke.Exec.
func (e *executor) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	// The kernel sends Pdeathsig when the thread ends that has started the plugin.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, path)
	cmd.Env, cmd.Stdin, cmd.Stdout, cmd.Stderr = environ, bytes.NewReader(stdin), &stdout, &stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Second // for programs that have left the plugin's group and hold its output
	err := cmd.Run()
	name := filepath.Base(path)
	switch {
	case err == nil:
		return stdout.Bytes(), nil
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return nil, fmt.Errorf("plugin %s has not answered within %v and was killed", name, e.wait)
	case ctx.Err() != nil:
		return nil, fmt.Errorf("plugin %s was killed: networks are closed", name)
	}
	var words types.Error
	if json.Unmarshal(stdout.Bytes(), &words) == nil && words.Msg != "" {
		return nil, &words
	}
	text := strings.TrimSpace(stderr.String() + stdout.String())
	if len(text) > maxWords {
		text = text[:maxWords] + "…"
	}
	return nil, fmt.Errorf("plugin %s: %w, it printed %q", name, err, text)
}
