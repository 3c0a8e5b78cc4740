package queue

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
)

// blobs holds the contents of large records, one file per record. A file is written before the
// message that names it, and deleted after that message. A crash may leave files that no message
// names; sweep removes them.
type blobs struct{ dir string }

const blobPrefix = "record-"

func openBlobs(dir string) (blobs, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return blobs{}, fmt.Errorf("journal: folder of large records: %w", err)
	}
	return blobs{dir}, nil
}

// put writes a file, syncs it and returns its name.
func (b blobs) put(data []byte) (name string, err error) {
	name = blobPrefix + rand.Text()
	f, err := os.OpenFile(filepath.Join(b.dir, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", disk.Explain(b.dir, int64(len(data)), err)
	}
	_, err = f.Write(data)
	if err = errors.Join(err, f.Sync(), f.Close()); err == nil {
		err = b.sync()
	}
	if err != nil {
		_ = b.drop(name) // if this fails, sweep removes it later
		return "", disk.Explain(b.dir, int64(len(data)), err)
	}
	return name, nil
}

// sync syncs the folder.
func (b blobs) sync() error {
	d, err := os.Open(b.dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (b blobs) get(name string) ([]byte, error) {
	if !strings.HasPrefix(name, blobPrefix) || strings.ContainsRune(name, '/') {
		return nil, fmt.Errorf("large record %q: not a name that the journal makes", name)
	}
	return os.ReadFile(filepath.Join(b.dir, name))
}

// drop removes a file. It does nothing for an empty name.
func (b blobs) drop(name string) error {
	if name == "" {
		return nil
	}
	if err := os.Remove(filepath.Join(b.dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// sweep removes all files that are not named.
func (b blobs) sweep(named map[string]bool) error {
	all, err := os.ReadDir(b.dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, f := range all {
		if strings.HasPrefix(f.Name(), blobPrefix) && !named[f.Name()] {
			errs = append(errs, b.drop(f.Name()))
		}
	}
	return errors.Join(errs...)
}
