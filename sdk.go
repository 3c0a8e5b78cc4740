// Package stagecoach contains the files that `stagecoach build` needs outside this repository: the
// SDK, which is the sources that a stage binary is compiled from, and the templates.
package stagecoach

import (
	"embed"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

// Module is the SDK's module path.
const Module = "github.com/stagecoach-serving/stagecoach"

//go:embed go.mod go.sum LICENSE all:templates
//go:embed stage/*.go stage/join/*.go stage/zygote/*.go stage/zygote/*.[ch]
//go:embed request/wire/*.go request/task/*.go tensor/*.go
//go:embed internal/disk/*.go internal/pack/*.go internal/third_party/onnxruntime
var files embed.FS

// Templates returns the folder of templates. Each has a template.yml, the main package, a
// Dockerfile and a first handler.
func Templates() fs.FS {
	t, err := fs.Sub(files, "templates")
	if err != nil {
		panic(err) // the name is a constant
	}
	return t
}

// requirement matches a requirement in a go.mod: module and version.
var requirement = regexp.MustCompile(`(?m)^\s*(?:require )?(golang\.org/x/sys) (v\S+)`)

// Requirements returns the lines of go.mod and go.sum for a program that imports only the SDK: the
// modules that the SDK imports, at the versions that it is tested with.
func Requirements() (mod, sum string, err error) {
	gomod, err := files.ReadFile("go.mod")
	if err != nil {
		return "", "", err
	}
	gosum, err := files.ReadFile("go.sum")
	if err != nil {
		return "", "", err
	}
	found := requirement.FindAllStringSubmatch(string(gomod), -1)
	if len(found) == 0 {
		return "", "", fmt.Errorf("go.mod of the SDK has no requirement that matches %q", requirement)
	}
	for _, m := range found {
		mod += fmt.Sprintf("require %s %s // indirect\n", m[1], m[2])
		for line := range strings.Lines(string(gosum)) {
			if strings.HasPrefix(line, m[1]+" "+m[2]+" ") || strings.HasPrefix(line, m[1]+" "+m[2]+"/go.mod ") {
				sum += line
			}
		}
	}
	return mod, sum, nil
}

// GoVersion returns the language version of the SDK, from go.mod.
func GoVersion() string {
	b, err := files.ReadFile("go.mod")
	if err != nil {
		panic(err) // it is embedded
	}
	_, rest, _ := strings.Cut(string(b), "\ngo ")
	version, _, _ := strings.Cut(rest, "\n")
	return version
}

// WriteSDK writes the SDK as a module into a folder, without its tests.
func WriteSDK(dir string) error {
	mod, sum, err := Requirements()
	if err != nil {
		return err
	}
	err = fs.WalkDir(files, ".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case name == "templates":
			return fs.SkipDir
		case d.IsDir() || strings.HasSuffix(name, "_test.go") || path.Dir(name) == "." && name != "LICENSE":
			return nil
		}
		b, err := files.ReadFile(name)
		if err != nil {
			return err
		}
		return write(filepath.Join(dir, filepath.FromSlash(name)), b)
	})
	if err != nil {
		return fmt.Errorf("SDK: %w", err)
	}
	gomod := fmt.Sprintf("module %s\n\ngo %s\n\n%s", Module, GoVersion(), strings.ReplaceAll(mod, " // indirect", ""))
	if err := write(filepath.Join(dir, "go.mod"), []byte(gomod)); err != nil {
		return fmt.Errorf("SDK: %w", err)
	}
	if err := write(filepath.Join(dir, "go.sum"), []byte(sum)); err != nil {
		return fmt.Errorf("SDK: %w", err)
	}
	return nil
}

func write(file string, b []byte) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, b, 0o644)
}
