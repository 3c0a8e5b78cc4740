package builder

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// Files in the image of a Python stage, beside stageFile and the files of the handler's folder.
const (
	sdkFolder   = "stagecoach"    // from the template
	siteFolder  = "site-packages" // packages that requirements.txt names
	handlerFile = "handler.py"
)

// oldestPython is the oldest minor version of Python 3 that the SDK runs on.
const oldestPython = 9

//go:embed prepare.py
var preparePy []byte

// python is an interpreter.
type python struct {
	command []string // program and its arguments before a script's name
	what    string   // path and version, for messages
	builder *Builder
}

// pythonStage writes the files of a Python stage's image, checks and compiles them, and returns the
// layers with its packages. It also returns the interpreter.
func (b *Builder) pythonStage(ctx context.Context, fn stack.Function, handler string, template fs.FS, dir string) (*python, []*image.Layer, error) {
	if _, err := os.Stat(filepath.Join(handler, handlerFile)); errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("handler: %s has no %s, want one with def infer(state, calls: list[sc.Call])", handler, handlerFile)
	}
	py, err := b.python(ctx, fn)
	if err != nil {
		return nil, nil, err
	}
	if err := b.copyPython(dir, handler, template); err != nil {
		return nil, nil, err
	}
	if err := py.prepare(ctx, "handler", dir); err != nil {
		return nil, nil, fmt.Errorf("handler: %w", err)
	}
	if err := py.prepare(ctx, "packages", dir); err != nil { // compiles the SDK
		return nil, nil, err
	}
	layers, err := py.packages(ctx, handler)
	return py, layers, err
}

// copyPython copies the template's program and SDK and the handler's files into one folder.
func (b *Builder) copyPython(dir, handler string, template fs.FS) error {
	err := b.walk(handler, func(file, name string) error {
		switch first, _, _ := strings.Cut(name, "/"); first {
		case stageFile, sdkFolder, sdkFolder + ".py", siteFolder:
			return fmt.Errorf("handler: %s is a name that the platform uses, want another", first)
		}
		if leftOut(name) {
			return nil
		}
		return copyFile(file, filepath.Join(dir, filepath.FromSlash(name)))
	})
	if err != nil {
		return err
	}
	err = fs.WalkDir(template, ".", func(name string, d fs.DirEntry, err error) error {
		switch first, _, _ := strings.Cut(name, "/"); {
		case err != nil:
			return err
		case d.IsDir() || first != stageFile && first != sdkFolder || leftOut(name):
			return nil
		}
		text, err := fs.ReadFile(template, name)
		if err != nil {
			return err
		}
		to, mode := filepath.Join(dir, filepath.FromSlash(name)), os.FileMode(0o644)
		if name == stageFile {
			mode = 0o755
		}
		return errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, text, mode))
	})
	if err != nil {
		return fmt.Errorf("template: %w", err)
	}
	return nil
}

// leftOut reports whether a file of a Python handler or template stays out of the image, because it
// is for people, tests or pip.
func leftOut(name string) bool {
	folders := strings.Split(path.Dir(name), "/")
	base := path.Base(name)
	return slices.Contains(folders, "testdata") || slices.Contains(folders, "__pycache__") ||
		slices.Contains([]string{".pyc", ".md", ".whl"}, path.Ext(base)) ||
		strings.HasPrefix(base, "test_") && path.Ext(base) == ".py" || strings.HasSuffix(base, "_test.py")
}

// python finds the interpreter that runs a function's processes. The command is the part of
// fprocess before ./stage, or python3 if fprocess names no interpreter. python looks for the
// command in the PATH of the function's processes, and then in the PATH of this process.
func (b *Builder) python(ctx context.Context, fn stack.Function) (*python, error) {
	words := strings.Fields(fn.FProcess)
	script := slices.Index(words, "./"+stageFile)
	switch {
	case len(words) == 0 || script == 0:
		words, script = []string{"python3"}, 1
	case script < 0 || strings.Contains(words[0], "/") && !filepath.IsAbs(words[0]):
		return nil, fmt.Errorf("fprocess: %q, want an interpreter by name or absolute path and ./%s, such as /opt/venv/bin/python ./%[2]s", fn.FProcess, stageFile)
	}
	py := &python{command: slices.Clone(words[:script]), builder: b}
	where := fn.Environment["PATH"]
	if where == "" {
		where = sandbox.Path
	}
	if !filepath.IsAbs(words[0]) {
		for _, folder := range filepath.SplitList(where) {
			if program, err := exec.LookPath(filepath.Join(folder, words[0])); err == nil {
				py.command[0] = program
				break
			}
		}
	}
	if _, err := exec.LookPath(py.command[0]); err != nil {
		return nil, fmt.Errorf("the interpreter %s is missing; it checks, compiles and runs the stage: install it (Debian: apt-get install python3 python3-pip), or name another with fprocess", words[0])
	}
	return py, py.ask(ctx)
}

// ask finds out the interpreter's version.
func (p *python) ask(ctx context.Context) error {
	const code = `import sys; print("%d %d %s" % (sys.version_info[0], sys.version_info[1], sys.executable))`
	cmd := p.cmd(ctx, "-c", code)
	cmd.Stderr = nil // Output puts it into the error
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("%s: %w%s", strings.Join(p.command, " "), err, stderrOf(err))
	}
	var major, minor int
	var program string
	if _, err := fmt.Sscan(string(out), &major, &minor, &program); err != nil {
		return fmt.Errorf("%s printed %q, want the version of Python", strings.Join(p.command, " "), out)
	}
	p.what = fmt.Sprintf("%s (Python %d.%d)", program, major, minor)
	if major != 3 || minor < oldestPython {
		return fmt.Errorf("%s is too old, want 3.%d or later: name another interpreter with fprocess, such as python3.11 ./%s", p.what, oldestPython, stageFile)
	}
	return nil
}

func stderrOf(err error) string {
	if e := (*exec.ExitError)(nil); errors.As(err, &e) && len(e.Stderr) > 0 {
		return "\n" + strings.TrimSpace(string(e.Stderr))
	}
	return ""
}

// prepare runs prepare.py on an image's folder. The compiled files depend only on the sources and
// the interpreter's version.
func (p *python) prepare(ctx context.Context, what, dir string) error {
	script := filepath.Join(p.builder.work, "prepare.py")
	if err := os.WriteFile(script, preparePy, 0o600); err != nil {
		return err
	}
	cmd := p.cmd(ctx, "-s", "-S", script, what, dir)
	cmd.Env = slices.DeleteFunc(os.Environ(), func(e string) bool { return strings.HasPrefix(e, "PYTHON") })
	cmd.Env = append(cmd.Env, "PYTHONHASHSEED=0") // before Python 3.11, compiled sets depend on it
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	switch err := cmd.Run(); {
	case err != nil && stdout.Len() > 0:
		return errors.New(stdout.String())
	case err != nil:
		return fmt.Errorf("%s: %w\n%s", p.what, err, strings.TrimSpace(stderr.String()))
	}
	return nil
}

// grace is how long descendants of a tool may keep its output open after the tool has ended.
const grace = 5 * time.Second

func (p *python) cmd(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, p.command[0], slices.Concat(p.command[1:], args)...)
	cmd.WaitDelay = grace
	return cmd
}
