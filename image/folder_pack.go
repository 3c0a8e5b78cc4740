package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// FolderLabel is the label of an image that was packed from a folder of images. Its program runs as
// it does from the folder: among the machine's files, also if it does not speak the stage protocol.
const FolderLabel = "dev.stagecoach.folder"

// PackFolder stores the content of a folder as an image without a name, and returns its digest. The
// same content gives the same digest. Each big file is a layer that is hashed and copied once: the
// file is known by its device, inode, size and time. stage says that the folder's program speaks
// the stage protocol. The folder must not change meanwhile.
func PackFolder(ctx context.Context, s *Store, folder string, stage bool) (digest string, err error) {
	small := &layer{what: "files"}
	var big []*Layer
	err = walkTree(folder, func(e entry) error {
		if e, err = inside(folder, e); err != nil {
			return err
		}
		if e.head.Typeflag != tar.TypeReg || e.head.Size < bigFile || len(big) == maxBig {
			small.entries = append(small.entries, e)
			return nil
		}
		l, err := packBig(ctx, s, e)
		big = append(big, l)
		return err
	})
	if err != nil {
		return "", fmt.Errorf("pack %s: %w", folder, err)
	}
	if err := small.measure(); err != nil {
		return "", fmt.Errorf("pack %s: %w", folder, err)
	}
	layers := []*layer{small}
	for _, l := range big {
		layers = append(layers, l.of)
	}
	c := Config{Labels: map[string]string{FolderLabel: "1"}}
	if stage {
		c.Labels[ProtocolLabel] = ProtocolVersion
	}
	img, err := compose(c, layers)
	if err != nil {
		return "", fmt.Errorf("pack %s: %w", folder, err)
	}
	return s.Add(ctx, img, "")
}

// packBig returns the layer with one file of a folder.
func packBig(ctx context.Context, s *Store, e entry) (*Layer, error) {
	info, err := os.Stat(e.path)
	if err != nil {
		return nil, err
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, errors.ErrUnsupported
	}
	key := fmt.Sprintf("file %q %o %d %d %d %d", e.head.Name, e.head.Mode, st.Dev, st.Ino, st.Size, info.ModTime().UnixNano())
	return s.MakeLayer(ctx, key, e.head.Name, func(root string) error {
		to := filepath.Join(root, filepath.FromSlash(e.head.Name))
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		return copyTo(to, e)
	})
}

func copyTo(to string, e entry) error {
	in, err := os.Open(e.path)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, os.FileMode(e.head.Mode))
	if err != nil {
		return err
	}
	n, err := io.Copy(out, in) // which the kernel does
	if err == nil && n != e.head.Size {
		err = fmt.Errorf("%s has %d bytes, want %d: it was changed meanwhile", e.path, n, e.head.Size)
	}
	return errors.Join(err, out.Close())
}

// inside returns an entry of a folder. If the entry is a link that leads out of the folder, the
// file that it leads to takes its place, because other machines do not have that file.
func inside(folder string, e entry) (entry, error) {
	if e.head.Typeflag != tar.TypeSymlink {
		return e, nil
	}
	root, err := filepath.EvalSymlinks(folder)
	if err != nil {
		return e, err
	}
	to, err := filepath.EvalSymlinks(e.path)
	if err != nil {
		return e, err
	}
	if strings.HasPrefix(to, root+string(filepath.Separator)) && !filepath.IsAbs(e.head.Linkname) {
		return e, nil
	}
	info, err := os.Stat(to)
	if err != nil {
		return e, err
	}
	if !info.Mode().IsRegular() {
		return e, fmt.Errorf("%s is a link to %s, want a link to a file, or to something in %s", e.path, to, folder)
	}
	e.path, e.changed = to, info.ModTime()
	e.head.Typeflag, e.head.Linkname, e.head.Size, e.head.Mode = tar.TypeReg, "", info.Size(), 0o644
	if info.Mode()&0o111 != 0 {
		e.head.Mode = 0o755
	}
	return e, nil
}
