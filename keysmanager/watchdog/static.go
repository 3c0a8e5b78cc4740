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

// staticPath is the default folder of mode static, which is of-watchdog's.
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
		// clients must not see the machine's path.
		if at := (*fs.PathError)(nil); errors.As(err, &at) {
			err = at.Err
		}
		return nil, nil, fmt.Errorf("static_path=%q: %w, want a folder inside the image", folder, err)
	}
	return http.FileServerFS(regular{root.FS()}), root, nil
}

// regular is a file system with folders and regular files only. Opening a pipe would block until it
// has a writer.
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
