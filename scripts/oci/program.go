package main

import (
	"cmp"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// source is a tree of sources, and what images say about it.
type source struct {
	root     string
	version  string // as `stagecoach version` prints it
	revision string // the commit
	created  time.Time
}

// sourceOf returns the source in a git work tree. The version has the form of Go's pseudo-versions.
// It ends with +dirty if files differ from the commit.
func sourceOf(ctx context.Context, root string) (source, error) {
	out, err := git(ctx, root, "log", "-1", "--format=%H %ct")
	if err != nil {
		return source{}, err
	}
	revision, seconds, _ := strings.Cut(strings.TrimSpace(out), " ")
	n, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil || len(revision) < 12 {
		return source{}, errors.Join(fmt.Errorf("git log: %q, want a commit and its time", out), err)
	}
	s := source{root: root, revision: revision, created: time.Unix(n, 0).UTC()}
	s.version = "v0.0.0-" + s.created.Format("20060102150405") + "-" + revision[:12]
	changed, err := git(ctx, root, "status", "--porcelain")
	if changed != "" {
		s.version += "+dirty"
	}
	return s, err
}

// tag returns the version as a tag of an image, which has no plus sign.
func (s source) tag() string { return strings.ReplaceAll(s.version, "+", "-") }

func git(ctx context.Context, root string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "git", args...)
	cmd.Dir = root
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w", args[0], withStderr(err))
	}
	return string(out), nil
}

// compile builds a program of the source. The result does not depend on the folder, on the state of
// git, or on the environment's flags.
func (s source) compile(ctx context.Context, pkg, arch string, cgo bool, to string) error {
	ldflags := "-s -w -buildid= -X main.release=" + s.version
	enabled := "0"
	if cgo {
		// -z lazy: NVML is opened when the program runs, see the Makefile.
		ldflags += " -extldflags=-Wl,-z,lazy,--build-id=none"
		enabled = "1"
	}
	to, err := filepath.Abs(to)
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-tags=noevaluation", "-ldflags="+ldflags, "-o", to, pkg)
	cmd.Dir = s.root
	cmd.Env = append(os.Environ(), "GOOS=linux", "GOARCH="+arch, "GOAMD64=v1", "GOARM64=v8.0", "GOFLAGS=",
		"GOEXPERIMENT=", "CGO_ENABLED="+enabled, "CGO_CFLAGS=-O2 -Wno-deprecated-declarations", "CGO_CPPFLAGS=", "CGO_LDFLAGS=")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("go build %s for %s: %w\n%s", pkg, arch, err, out)
	}
	return nil
}

// checkLibc returns an error if a program needs a later version of glibc than the package has. The
// machine that builds may have a later one than the image.
func checkLibc(program string, all []deb) error {
	f, err := elf.Open(program)
	if err != nil {
		return err
	}
	defer f.Close()
	symbols, err := f.ImportedSymbols()
	if err != nil {
		return fmt.Errorf("%s: %w", program, err)
	}
	for _, d := range all {
		if d.name != "libc6" {
			continue
		}
		for _, s := range symbols {
			if need, ok := strings.CutPrefix(s.Version, "GLIBC_"); ok && compareVersions(need, d.version) > 0 {
				return fmt.Errorf("%s: its symbol %s needs glibc %s, but the image has %s: build on a machine with an earlier glibc, such as Debian 12", program, s.Name, need, d.version)
			}
		}
		return nil
	}
	return errors.New("the lock file has no libc6")
}

// compareVersions compares major and minor versions of glibc, such as 2.34 and 2.36-9+deb12u14.
func compareVersions(a, b string) int {
	parse := func(s string) (major, minor int) {
		s, _, _ = strings.Cut(s, "-")
		x, y, _ := strings.Cut(s, ".")
		y, _, _ = strings.Cut(y, ".")
		major, _ = strconv.Atoi(x)
		minor, _ = strconv.Atoi(y)
		return major, minor
	}
	a1, a2 := parse(a)
	b1, b2 := parse(b)
	return cmp.Or(cmp.Compare(a1, b1), cmp.Compare(a2, b2))
}
