package paper

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/stagecoach-serving/stagecoach/sim/study"
)

// store opens the file of finished runs, and makes it if there is none. The caller closes the file.
// Without a wanted file, both results are nil.
func (f *paperFlags) store() (*study.Store, io.Closer, error) {
	path := f.runs
	if path == "" && f.out != "" && (f.full || f.tune) {
		path = filepath.Join(f.out, "runs.jsonl")
	}
	if path == "" {
		return nil, nil, nil
	}
	version, err := programVersion()
	if err != nil {
		return nil, nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, nil, err
	}
	file, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, nil, err
	}
	s, err := study.NewStore(file, version)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("runs in %s: %w", path, err), file.Close())
	}
	return s, file, nil
}

// programVersion returns a hash of the program's file. Any change of a policy, a load or the
// simulator changes it.
func programVersion() (string, error) {
	path, err := os.Executable()
	if err != nil {
		return "", err
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return "", err
	}
	return fmt.Sprintf("%x", h.Sum(nil)), nil
}
