package builder

import (
	"cmp"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/image"
)

const requirementsFile = "requirements.txt"

// packages returns the layers with the packages that the handler's requirements.txt names. The
// interpreter's pip chooses the wheels, with the user's configuration, and prints its progress. A
// wheel is not installed again if the store already has its layer. If the index cannot be reached,
// pip chooses among the wheels that earlier builds have kept.
func (p *python) packages(ctx context.Context, handler string) ([]*image.Layer, error) {
	text, err := requirements(handler)
	if text == "" || err != nil {
		return nil, err
	}
	kept, err := p.keptWheels(ctx, handler, text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", requirementsFile, err)
	}
	identity, err := p.identity(ctx)
	if err != nil {
		return nil, err
	}
	key := keyOf(identity, text)
	before, holds := kept.lastChoice(key, text)
	if holds {
		layers, err := p.layers(ctx, handler, kept.folder, before)
		if !errors.Is(err, errNoWheel) {
			return layers, err
		}
	}
	now, err := p.choose(ctx, handler, kept, before)
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(now.folder) }() // another build may remove it, too
	if kept != nil {
		if err := errors.Join(kept.add(now), kept.saveChoice(key, now.wheels)); err != nil {
			fmt.Fprintf(p.output(), "build: the packages could not be kept for the next build: %v\n", err)
		}
	}
	return p.layers(ctx, handler, now.folder, now.wheels)
}

// output returns the writer for pip's progress.
func (p *python) output() io.Writer { return cmp.Or[io.Writer](p.builder.Output, io.Discard) }

// pip runs a command of pip in the handler's folder, because paths in requirements.txt are relative
// to it.
func (p *python) pip(ctx context.Context, handler string, args ...string) error {
	cmd := p.cmd(ctx, slices.Concat([]string{"-m", "pip"}, args, []string{"--disable-pip-version-check", "--no-input"})...)
	cmd.Dir = handler
	// These settings change no environment.
	cmd.Env = append(os.Environ(), "PIP_REQUIRE_VIRTUALENV=0", "PIP_ROOT_USER_ACTION=ignore")
	said := &tail{to: p.output()}
	cmd.Stdout, cmd.Stderr = said, said
	err := cmd.Run()
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case strings.Contains(said.String(), "No module named pip"):
		return p.noPip()
	}
	return fmt.Errorf("%s: pip of %s: %w\n%s", requirementsFile, p.what, err, said)
}

func (p *python) noPip() error {
	return fmt.Errorf("%s: %s has no pip, which installs it (Debian: apt-get install python3-pip; elsewhere: %s -m ensurepip)", requirementsFile, p.what, strings.Join(p.command, " "))
}

// requires reports whether a requirements.txt has more than comments.
func requires(text string) bool {
	for line := range strings.Lines(text) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			return true
		}
	}
	return false
}

// tail passes on all writes, and remembers the end of the text.
type tail struct {
	to  io.Writer
	end []byte
}

// Bounds of the text that a tail remembers.
const (
	tailBytes = 4 << 10
	tailLines = 15
)

func (t *tail) Write(p []byte) (int, error) {
	t.end = append(t.end, p...)
	t.end = slices.Clone(t.end[max(0, len(t.end)-tailBytes):])
	return t.to.Write(p)
}

func (t *tail) String() string {
	lines := strings.Split(strings.TrimSpace(string(t.end)), "\n")
	return strings.Join(lines[max(0, len(lines)-tailLines):], "\n")
}

// normalise makes installed packages independent of the folder, the user and the source of their
// installation. It removes the packages' programs, because their first line has the interpreter's
// path. It also removes compiled modules, because they were compiled in another folder.
func normalise(site string) error {
	var caches, records []string
	err := filepath.WalkDir(site, func(file string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && d.Name() == "__pycache__":
			caches = append(caches, file)
			return fs.SkipDir
		case !d.IsDir() && d.Name() == "RECORD" && strings.HasSuffix(filepath.Dir(file), ".dist-info"):
			records = append(records, file)
		}
		return nil
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil // nothing was installed
	}
	if err != nil {
		return err
	}
	for _, c := range caches {
		if err := os.RemoveAll(c); err != nil {
			return err
		}
	}
	for _, r := range records {
		if err := record(site, r); err != nil {
			return fmt.Errorf("%s: %w", filepath.Base(filepath.Dir(r)), err)
		}
	}
	_ = os.Remove(filepath.Join(site, "bin")) // fails if a package has files there
	return nil
}

// record rewrites a package's list of files. The list has the files of the image, sorted. record
// removes the package's programs.
func record(site, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	reader := csv.NewReader(strings.NewReader(string(text)))
	reader.FieldsPerRecord = -1
	rows, err := reader.ReadAll()
	if err != nil {
		return fmt.Errorf("RECORD: %w", err)
	}
	// direct is the file with the path or URL of a package that requirements.txt does not name by
	// version.
	const direct = "direct_url.json"
	var kept [][]string
	for _, row := range rows {
		name := row[0]
		// pip names programs like this before it moves them to --target.
		if folder, program := filepath.Split(name); folder == "../../bin/" && filepath.IsLocal(program) {
			if err := remove(filepath.Join(site, "bin", program)); err != nil {
				return err
			}
		}
		if filepath.IsLocal(name) && filepath.Base(name) != direct && !strings.Contains(name, "__pycache__/") {
			kept = append(kept, row)
		}
	}
	if err := remove(filepath.Join(filepath.Dir(file), direct)); err != nil {
		return err
	}
	slices.SortFunc(kept, slices.Compare[[]string])
	var out strings.Builder
	w := csv.NewWriter(&out)
	if err := w.WriteAll(kept); err != nil {
		return err
	}
	return os.WriteFile(file, []byte(out.String()), 0o644)
}

func remove(file string) error {
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
