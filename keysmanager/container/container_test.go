package container

import (
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/containerdtest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// initProgram builds stagecoach-init once.
var initProgram = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "init")
	if err != nil {
		return "", err
	}
	path := filepath.Join(dir, "stagecoach-init")
	cmd := exec.Command("go", "build", "-o", path, "github.com/stagecoach-serving/stagecoach/cmd/stagecoach-init")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	cmd.Stderr = os.Stderr
	return path, cmd.Run()
})

func open(t *testing.T, s *containerdtest.Server) *Runtime {
	t.Helper()
	init, err := initProgram()
	if err != nil {
		t.Fatal(err)
	}
	r, err := Open(t.Context(), Config{Address: s.Address, Namespace: "stagecoach-test", Node: t.Name(), Init: init, Log: slog.Default()})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestRootProgram(t *testing.T) {
	s := containerdtest.Start(t)
	r := open(t, s)
	defer r.Close()
	image := filepath.Join(proctest.Outside(t), "image")
	if err := os.MkdirAll(filepath.Join(image, "etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{"bin", "lib", "lib64"} {
		if err := os.Symlink("usr/"+dir, filepath.Join(image, dir)); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		out, err := sandbox.NewOutput(func(stream, line string) { t.Log(stream, line) })
		if err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		p, err := r.Start(sandbox.Command{Chroot: image, Dir: "/work", Binds: []sandbox.Bind{{From: "/usr", To: "/usr"}}, Argv: []string{"sh", "-c", "id; pwd; ls -la / /dev /dev/stagecoach/run; cat /proc/self/status | grep -i cap; cat /etc/passwd; mount; exit 7"}, Stdout: out.Stdout, Stderr: out.Stderr})
		out.Started()
		t.Log("started in", time.Since(begin), err)
		if err != nil {
			t.Fatal(err)
		}
		if st := p.Wait(); st.ExitStatus() != 7 {
			t.Error(st)
		}
		t.Log("ended after", time.Since(begin))
		out.Finish(time.Second)
		p.Forget()
	}
	_ = strings.Contains
	_ = unix.SIGKILL
}
