package watchdog

import (
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
)

// staticPath is the folder of the image whose files are served in mode static, as of-watchdog has
// it.
const staticPath = "/home/app/public"

// static serves the files below a folder of an image, and nothing outside the image. The caller
// closes the folder.
func static(image, folder string) (http.Handler, *os.Root, error) {
	rel := strings.TrimPrefix(filepath.Join("/", folder), "/")
	if rel == "" {
		rel = "."
	}
	whole, err := os.OpenRoot(image)
	if err != nil {
		return nil, nil, fmt.Errorf("image: %w", err)
	}
	defer whole.Close()
	root, err := whole.OpenRoot(rel)
	if err != nil {
		if at := (*fs.PathError)(nil); errors.As(err, &at) { // clients must not see the machine's path
			err = at.Err
		}
		return nil, nil, fmt.Errorf("static_path=%q: %w, want a folder inside the image", folder, err)
	}
	return http.FileServerFS(regular{root.FS()}), root, nil
}

// regular is a file system that has only folders and regular files. Opening a pipe would block
// until it has a writer.
type regular struct{ fs.FS }

// Open implements fs.FS.
func (r regular) Open(name string) (fs.File, error) {
	info, err := fs.Stat(r.FS, name)
	if err != nil {
		return nil, err
	}
	if !info.IsDir() && !info.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return r.FS.Open(name)
}
