package builder

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"go/version"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach"
)

// compile makes a function's stage binary. A handler that belongs to a Go module is compiled in
// that module. Any other handler becomes the package handler/function of a new module, as with
// `faas-cli build`.
func (b *Builder) compile(ctx context.Context, name, handler string, template fs.FS, binary string) error {
	if err := b.needTools(ctx); err != nil {
		return err
	}
	shown := filepath.Clean(handler)
	handler, err := filepath.Abs(handler)
	if err != nil {
		return err
	}
	pkg, err := packageName(handler)
	if err != nil {
		return err
	}
	root := moduleRoot(handler)
	if pkg != "" && root != "" {
		return b.compileInModule(ctx, name, handler, root, pkg, template, binary)
	}
	dir := filepath.Join(b.work, "context", name)
	if err := b.shrinkwrap(dir, handler, pkg != "", template); err != nil {
		return err
	}
	target := "."
	if pkg == "main" {
		target = "./function"
	}
	if pkg == "" { // compile the template, because the handler is no package
		shown = "function"
	}
	return b.goBuild(ctx, dir, "off", binary, shown, "-mod=readonly", target)
}

// shrinkwrap makes the build context: the template, the handler in the template's folder function,
// and the SDK.
func (b *Builder) shrinkwrap(dir, handler string, hasGo bool, template fs.FS) error {
	// Files of an earlier build may be links into the handler's folder, so they are not
	// overwritten.
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := templateFiles(template, dir, hasGo); err != nil {
		return fmt.Errorf("template: %w", err)
	}
	err := b.walk(handler, func(file, name string) error {
		to := filepath.Join(dir, "function", filepath.FromSlash(name))
		if err := os.Remove(to); err != nil && !errors.Is(err, fs.ErrNotExist) { // the template's file
			return err
		}
		return linkFile(file, to)
	})
	if err != nil {
		return err
	}
	if err := stagecoach.WriteSDK(filepath.Join(dir, "sdk")); err != nil {
		return err
	}
	mod, sum, err := stagecoach.Requirements()
	if err != nil {
		return err
	}
	gomod := fmt.Sprintf("module handler\n\ngo %s\n\nrequire %s v0.0.0\n%s\nreplace %[2]s => ./sdk\n", stagecoach.GoVersion(), stagecoach.Module, mod)
	return errors.Join(os.WriteFile(filepath.Join(dir, "go.mod"), []byte(gomod), 0o600), os.WriteFile(filepath.Join(dir, "go.sum"), []byte(sum), 0o600))
}

// compileInModule compiles a handler in its own module. It writes nothing there: the compiler sees
// the SDK as an overlay, and the main package, unless the handler is one.
func (b *Builder) compileInModule(ctx context.Context, name, handler, root, pkg string, template fs.FS, binary string) error {
	gomod, err := os.ReadFile(filepath.Join(root, "go.mod"))
	if err != nil {
		return err
	}
	module := modulePath(gomod)
	if module == "" {
		return fmt.Errorf("%s has no module line", filepath.Join(root, "go.mod"))
	}
	rel, err := filepath.Rel(root, handler)
	if err != nil {
		return err
	}
	work := "off"
	if module != stagecoach.Module {
		if work, err = b.workspace(name, root, gomod); err != nil {
			return err
		}
	}
	flags := []string{"-mod=readonly"}
	target := "./" + filepath.ToSlash(rel)
	if pkg != "main" {
		main, err := fs.ReadFile(template, "main.go")
		if err != nil {
			return fmt.Errorf("template: %w", err)
		}
		imports := path.Join(module, filepath.ToSlash(rel))
		main = bytes.ReplaceAll(main, []byte(`"handler/function"`), []byte(`function "`+imports+`"`))
		overlay, err := b.overlay(name, filepath.Join(handler, "stagecoach-main", "main.go"), main)
		if err != nil {
			return err
		}
		flags, target = append(flags, "-overlay="+overlay), target+"/stagecoach-main"
	}
	return b.goBuild(ctx, root, work, binary, "function", append(flags, target)...)
}

// workspace returns a value of GOWORK for a handler's module. This is a new go.work with the module
// and the SDK that this program contains, or "off" if the module's go.mod replaces the SDK itself.
// Unlike a replacement in a go.mod, a go.work leaves no path in the binary.
func (b *Builder) workspace(name, root string, gomod []byte) (string, error) {
	if regexp.MustCompile(`(?m)^\s*(replace\s+)?` + regexp.QuoteMeta(stagecoach.Module) + `(\s+v\S+)?\s+=>`).Match(gomod) {
		return "off", nil
	}
	dir := filepath.Join(b.work, "workspace", name)
	if err := stagecoach.WriteSDK(filepath.Join(dir, "sdk")); err != nil {
		return "", err
	}
	language := stagecoach.GoVersion()
	if m := goLine.FindSubmatch(gomod); m != nil && version.Compare("go"+string(m[1]), "go"+language) > 0 {
		language = string(m[1])
	}
	file := filepath.Join(dir, "go.work")
	text := fmt.Sprintf("go %s\n\nuse (\n\t%q\n\t./sdk\n)\n", language, root)
	return file, os.WriteFile(file, []byte(text), 0o600)
}

// overlay makes the compiler see a file that does not exist.
func (b *Builder) overlay(name, at string, text []byte) (string, error) {
	dir := filepath.Join(b.work, "overlay", name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	file := filepath.Join(dir, "main.go")
	list, err := json.Marshal(map[string]map[string]string{"Replace": {at: file}})
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "overlay.json"), errors.Join(os.WriteFile(file, text, 0o600), os.WriteFile(filepath.Join(dir, "overlay.json"), list, 0o600))
}

// goBuild runs the compiler. The same sources give the same binary.
func (b *Builder) goBuild(ctx context.Context, dir, workspace, binary, shown string, args ...string) error {
	cmd := exec.CommandContext(ctx, "go", append([]string{"build", "-trimpath", "-buildvcs=false", "-ldflags=-s -w", "-tags=template", "-o", binary}, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1", "GOWORK="+workspace)
	out, err := cmd.CombinedOutput()
	if err == nil {
		return nil
	}
	text := strings.ReplaceAll(strings.TrimSpace(string(out)), b.work+string(filepath.Separator), "")
	text = contextFile.ReplaceAllLiteralString(text, shown+"/")
	if strings.Contains(text, "no required module provides package") || strings.Contains(text, "cannot find module providing package") {
		text += "\n(for modules beside the SDK the handler's folder becomes a module: go mod init handler/function, go get MODULE)"
	}
	return fmt.Errorf("go build: %w\n%s", err, text)
}

// contextFile matches the start of a message about a file of the handler in a build context.
var contextFile = regexp.MustCompile(`(?m)^function/`)

// needTools returns an error that says what to install, if a tool is missing.
func (b *Builder) needTools(ctx context.Context) error {
	if b.tools {
		return nil
	}
	if _, err := exec.LookPath("go"); err != nil {
		return fmt.Errorf("the Go toolchain is missing; it compiles stages: install version %s or later from go.dev/dl (Debian: apt-get install golang)", stagecoach.GoVersion())
	}
	out, err := exec.CommandContext(ctx, "go", "env", "CC").Output()
	if err != nil {
		return fmt.Errorf("go env CC: %w", err)
	}
	cc := strings.Fields(string(out))
	if len(cc) == 0 {
		return errors.New("go env CC names no C compiler, want one such as gcc")
	}
	if _, err := exec.LookPath(cc[0]); err != nil {
		return fmt.Errorf("the C compiler %s is missing; it compiles the code that stages share with their zygote: install it (Debian: apt-get install gcc libc6-dev)", cc[0])
	}
	b.tools = true
	return nil
}

// packageName returns the name of the Go package in a folder, or "" if there is none.
func packageName(dir string) (string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", fmt.Errorf("handler: %w", err)
	}
	names := map[string]bool{}
	for _, e := range entries {
		if e.IsDir() || !strings.HasSuffix(e.Name(), ".go") || strings.HasSuffix(e.Name(), "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, e.Name()), nil, parser.PackageClauseOnly)
		if err != nil {
			return "", fmt.Errorf("handler: %w", err)
		}
		names[f.Name.Name] = true
	}
	if len(names) > 1 {
		return "", fmt.Errorf("handler: %s has the packages %s, want one", dir, strings.Join(slices.Sorted(maps.Keys(names)), " and "))
	}
	for n := range names {
		return n, nil
	}
	return "", nil
}

// moduleRoot returns the folder of the go.mod that a folder belongs to, or "" if there is none.
func moduleRoot(dir string) string {
	for {
		if info, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil && !info.IsDir() {
			return dir
		}
		up := filepath.Dir(dir)
		if up == dir {
			return ""
		}
		dir = up
	}
}

var goLine = regexp.MustCompile(`(?m)^go\s+(\S+)`)

var moduleLine = regexp.MustCompile(`(?m)^module\s+"?([^\s"]+)"?`)

func modulePath(gomod []byte) string {
	if m := moduleLine.FindSubmatch(gomod); m != nil {
		return string(m[1])
	}
	return ""
}
