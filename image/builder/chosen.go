package builder

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// chosenSuffix ends the names of the files that list pip's choice of wheels for a requirements.txt.
// Such a file is removed chosenAge after it was last written.
const (
	chosenSuffix = ".chosen"
	chosenAge    = 30 * 24 * time.Hour
)

// askAgain is how long pip's choice is valid for a requirements.txt that names exact versions. The
// versions of their dependencies may be open, so pip asks the index once a day.
const askAgain = 24 * time.Hour

// chosen is pip's choice of wheels, and their folder.
type chosen struct {
	folder string
	wheels []wheel
}

// choose runs pip, with the user's configuration, to choose the wheels for a requirements.txt. The
// argument before has the wheels of pip's last choice for the same text, which are not downloaded
// again.
func (p *python) choose(ctx context.Context, handler string, kept *wheels, before []wheel) (out chosen, err error) {
	at, prefix := p.builder.work, "wheels-"
	if kept != nil { // on the disk of the kept wheels, so that wheels are linked and not copied
		at, prefix = kept.folder, partPrefix
	}
	folder, err := os.MkdirTemp(at, prefix)
	if err != nil {
		return chosen{}, err
	}
	defer func() {
		if out.folder != folder {
			err = errors.Join(err, os.RemoveAll(folder))
		}
	}()
	args := []string{"wheel", "--wheel-dir", folder, "-r", requirementsFile}
	if kept != nil {
		args = append(args, "--find-links", kept.folder)
	}
	known := map[string]wheel{}
	unchanged := map[string]time.Time{}
	for _, w := range before {
		file := filepath.Join(folder, w.File)
		if info, err := os.Stat(filepath.Join(kept.folder, w.File)); err == nil && info.Size() == w.Size && os.Link(filepath.Join(kept.folder, w.File), file) == nil {
			known[file], unchanged[file] = w, info.ModTime()
		}
	}
	if err := p.pip(ctx, handler, args...); err != nil {
		return chosen{}, err
	}
	files, err := filepath.Glob(filepath.Join(folder, "*.whl"))
	if err != nil {
		return chosen{}, err
	}
	// Some wheels may be unused: choose again, in an empty folder.
	if len(known) > 0 && len(files) != len(before) {
		return p.choose(ctx, handler, kept, nil)
	}
	for _, file := range files {
		w, err := wheelOf(file, known[file], unchanged[file])
		if err != nil {
			return chosen{}, err
		}
		out.wheels = append(out.wheels, w)
	}
	out.folder = folder
	return out, nil
}

// wheelOf describes a wheel file. before is an earlier description, and unchanged is the file's
// modification time then. If this time and the size are still the same, wheelOf returns the earlier
// description without reading the file.
func wheelOf(file string, before wheel, unchanged time.Time) (wheel, error) {
	info, err := os.Stat(file)
	if err != nil {
		return wheel{}, err
	}
	if before.File != "" && info.Size() == before.Size && info.ModTime().Equal(unchanged) {
		return before, nil
	}
	hash, err := hashFile(file)
	return wheel{filepath.Base(file), hash, info.Size()}, err
}

// lastChoice returns pip's last choice of wheels. holds reports that the choice is valid without
// asking the index: all versions are exact, and it is not older than askAgain.
func (w *wheels) lastChoice(key, requirements string) (all []wheel, holds bool) {
	if w == nil {
		return nil, false
	}
	file := filepath.Join(w.folder, key+chosenSuffix)
	info, err := os.Stat(file)
	if err != nil {
		return nil, false
	}
	text, err := os.ReadFile(file)
	if err != nil || json.Unmarshal(text, &all) != nil || slices.ContainsFunc(all, func(w wheel) bool { return filepath.Base(w.File) != w.File }) {
		return nil, false
	}
	age := time.Since(info.ModTime())
	return all, exact(requirements) && age >= 0 && age < askAgain
}

// saveChoice stores pip's choice of wheels.
func (w *wheels) saveChoice(key string, all []wheel) error {
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	tmp, err := os.MkdirTemp(w.folder, partPrefix)
	if err != nil {
		return err
	}
	part := filepath.Join(tmp, "chosen")
	if err = os.WriteFile(part, text, 0o600); err == nil {
		err = os.Rename(part, filepath.Join(w.folder, key+chosenSuffix))
	}
	return errors.Join(err, os.RemoveAll(tmp))
}

// forget removes choices that no build has made for chosenAge.
func (w *wheels) forget() error {
	files, err := filepath.Glob(filepath.Join(w.all, "*", "*"+chosenSuffix))
	if err != nil {
		return err
	}
	for _, file := range files {
		if info, err := os.Stat(file); err == nil && time.Since(info.ModTime()) > chosenAge {
			if err := remove(file); err != nil {
				return err
			}
		}
	}
	return nil
}

var exactLine = regexp.MustCompile(`^[A-Za-z0-9._-]+\s*(\[[^]]*\])?\s*===?\s*[^\s,*;]+\s*(;.*)?(\\|--hash.*)?$`)

// exact reports whether each line of a requirements.txt names one version.
func exact(requirements string) bool {
	for line := range strings.Lines(requirements) {
		line, _, _ = strings.Cut(strings.TrimSpace(line), " #")
		line = strings.TrimSpace(line)
		if line != "" && line[0] != '#' && line[0] != '-' && !exactLine.MatchString(line) {
			return false
		}
	}
	return true
}

// hashFile returns the SHA-256 of a file.
func hashFile(file string) (string, error) {
	f, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	_, err = io.Copy(h, f)
	return hex.EncodeToString(h.Sum(nil)), err
}

// keyOf returns the name of a choice. It depends on the interpreter, because the same requirements
// may need other wheels for another interpreter.
func keyOf(identity, requirements string) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q", identity, requirements))
	return hex.EncodeToString(sum[:8])
}

// requirements returns the text of a handler's requirements.txt; empty if it requires nothing.
func requirements(handler string) (string, error) {
	text, err := os.ReadFile(filepath.Join(handler, requirementsFile))
	if errors.Is(err, fs.ErrNotExist) || err == nil && !requires(string(text)) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", requirementsFile, err)
	}
	return string(text), nil
}
