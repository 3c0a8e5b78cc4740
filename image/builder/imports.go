package builder

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

//go:embed imports.py
var importsPy []byte

// importPatience is how long the import of a handler may take before the build goes on without its
// result.
const importPatience = 2 * time.Minute

// imports imports the handler in an image's folder as the stage's processes will, with the same
// interpreter and the function's environment. It returns an error if Python cannot find or import a
// module. Any other exception is only printed, because it may occur only during the build: for
// example, a secret is missing there.
func (p *python) imports(ctx context.Context, fn stack.Function, dir string) error {
	work, err := os.MkdirTemp(p.builder.work, "imports-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	root, script, result := filepath.Join(work, "image"), filepath.Join(work, "imports.py"), filepath.Join(work, "result")
	if err := errors.Join(link(dir, root), os.WriteFile(script, importsPy, 0o600)); err != nil {
		return err
	}
	limited, cancel := context.WithTimeout(ctx, importPatience)
	defer cancel()
	cmd := p.cmd(limited, script, result)
	cmd.Dir = root
	cmd.Env = []string{"PATH=" + sandbox.Path, "HOME=" + sandbox.Home, "TMPDIR=" + sandbox.Home, "PYTHONDONTWRITEBYTECODE=1"}
	for name, value := range fn.Environment {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	said := &tail{to: io.Discard}
	cmd.Stdout, cmd.Stderr = said, said
	err = cmd.Run()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	told, unread := os.ReadFile(result)
	kind, text, _ := strings.Cut(string(told), "\n")
	switch {
	case kind == "missing":
		return fmt.Errorf("handler: %s, which %s does not have: put it into %s, or install it for that interpreter, or name another "+
			"interpreter with fprocess; if only the machine that runs the stage has it, build with --check-imports=false", text, p.what, requirementsFile)
	case kind == "import":
		return fmt.Errorf("handler: %s: %s cannot import it; if the machine that runs the stage can, build with --check-imports=false", text, p.what)
	case kind == "other":
		p.note("the import of the handler raises %s", text)
	case limited.Err() != nil:
		p.note("the import of the handler takes more than %v", importPatience)
	case err != nil:
		p.note("the import of the handler ended %s with %v\n%s\n", p.what, err, said)
	case unread != nil && !errors.Is(unread, fs.ErrNotExist):
		return unread
	}
	return nil
}

// note prints a remark that does not fail the build.
func (p *python) note(format string, args ...any) {
	if p.builder.Output != nil {
		fmt.Fprintf(p.builder.Output, "build: "+format+"; its modules were not checked\n", args...)
	}
}

// link makes a folder with a symbolic link to each entry of another one. Files that are created in
// the new folder are not in the other one.
func link(from, to string) error {
	entries, err := os.ReadDir(from)
	if err != nil {
		return err
	}
	if err := os.Mkdir(to, 0o700); err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.Symlink(filepath.Join(from, e.Name()), filepath.Join(to, e.Name())); err != nil {
			return err
		}
	}
	return nil
}
