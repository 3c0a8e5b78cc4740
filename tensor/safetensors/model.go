package safetensors

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNone means that a path has no name of this format, and is no folder with such a file.
var ErrNone = errors.New("no *.safetensors")

// Part is a file of a model.
type Part struct {
	Name    string // in its folder
	Bytes   int64
	Tensors []Info // in the order of their places in the file
}

// Model describes a model's files, without their data.
type Model struct {
	Folder  string
	Parts   []Part // sorted by name
	Tensors int
	Bytes   int64 // total size of the files: the memory that the mapped model needs
	Data    int64 // total size of the tensors: the memory that the model needs on a device
}

// The ends of the names of a model's files.
const (
	fileName  = ".safetensors"
	indexName = ".safetensors.index.json"
)

// Further limits of a model's files.
const (
	maxParts = 1000     // files; no model has more
	maxIndex = 32 << 20 // bytes of an index
	maxName  = 255      // bytes per file name
)

// Inspect reads and checks the headers of a model's files. The package comment says which files a
// model has. Inspect maps nothing and reads no data, so it takes milliseconds even for gigabytes.
// For a path without such files, the error is ErrNone.
func Inspect(path string) (Model, error) {
	folder, names, index, err := files(path)
	if err != nil {
		return Model{}, err
	}
	m := Model{Folder: folder}
	owner := map[string]string{}
	for _, name := range names {
		p, err := inspect(filepath.Join(folder, name))
		if index != nil && errors.Is(err, fs.ErrNotExist) {
			return Model{}, fmt.Errorf("%s: there is no %s, want each file that its index names: %w", folder, name, err)
		}
		if err != nil {
			return Model{}, err
		}
		for _, t := range p.Tensors {
			if other, twice := owner[t.Name]; twice {
				return Model{}, fmt.Errorf("%s: tensor %.80q: it is in %s and %s, want it once", folder, t.Name, other, name)
			}
			owner[t.Name] = name
			m.Data += t.Bytes
		}
		if m.Tensors += len(p.Tensors); m.Tensors > maxTensors {
			return Model{}, fmt.Errorf("%s: more than %d tensors", folder, maxTensors)
		}
		m.Bytes += p.Bytes
		m.Parts = append(m.Parts, p)
		if headers := m.Bytes - m.Data; headers > maxHeader {
			return Model{}, fmt.Errorf("%s: headers of %d bytes up to %s, want at most %d of all files", folder, headers, name, maxHeader)
		}
	}
	if index == nil || maps.Equal(index, owner) {
		return m, nil
	}
	return Model{}, fmt.Errorf("%s: %s; want both of the same download", folder, difference(index, owner))
}

// inspect reads the header of a file.
func inspect(path string) (Part, error) {
	f, size, err := regular(path)
	if err != nil {
		return Part{}, err
	}
	defer f.Close()
	file, err := Read(f, size)
	if err != nil {
		return Part{}, fmt.Errorf("%s: %w", path, err)
	}
	return Part{Name: filepath.Base(path), Bytes: size, Tensors: file.tensors}, nil
}

// regular opens a regular file. It refuses all other files, because opening one could block or have
// effects.
func regular(path string) (*os.File, int64, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("%s: %v, want a regular file", path, info.Mode())
	}
	if err != nil {
		_ = f.Close()
		return nil, 0, err
	}
	return f, info.Size(), nil
}

// files returns the folder and the names of a model's files, and the index's file by tensor, if
// there is an index.
func files(path string) (folder string, names []string, index map[string]string, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return "", nil, nil, err
	}
	if !info.IsDir() {
		folder, name := filepath.Split(path)
		switch {
		case strings.HasSuffix(name, indexName):
			names, index, err = readIndex(path)
			return folder, names, index, err
		case strings.HasSuffix(name, fileName):
			return folder, []string{name}, nil, nil
		}
		return "", nil, nil, fmt.Errorf("%s: %w", path, ErrNone)
	}
	entries, err := os.ReadDir(path)
	if err != nil {
		return "", nil, nil, err
	}
	var indexes []string
	for _, e := range entries {
		switch name := e.Name(); {
		case strings.HasPrefix(name, "."):
		case strings.HasSuffix(name, indexName):
			indexes = append(indexes, name)
		case strings.HasSuffix(name, fileName):
			names = append(names, name)
		}
	}
	switch {
	case len(indexes) > 1:
		return "", nil, nil, fmt.Errorf("%s: the indexes %s, want one: name it as the model", path, strings.Join(indexes, " and "))
	case len(indexes) == 1:
		names, index, err = readIndex(filepath.Join(path, indexes[0]))
		return path, names, index, err
	case len(names) == 0:
		return "", nil, nil, fmt.Errorf("%s: %w", path, ErrNone)
	case len(names) > maxParts:
		return "", nil, nil, fmt.Errorf("%s: %d files, want at most %d", path, len(names), maxParts)
	}
	return path, names, nil, nil
}

// readIndex reads an index; see parseIndex.
func readIndex(path string) (names []string, index map[string]string, err error) {
	f, size, err := regular(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	if size > maxIndex {
		return nil, nil, fmt.Errorf("%s: %d bytes, want at most %d", path, size, maxIndex)
	}
	b := make([]byte, size)
	if _, err := io.ReadFull(f, b); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	names, index, err = parseIndex(b)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", path, err)
	}
	return names, index, nil
}

// parseIndex returns the files that an index names, sorted, and the file of each tensor.
func parseIndex(b []byte) (names []string, index map[string]string, err error) {
	var all map[string]json.RawMessage // a struct would match field names in any case
	if err := json.Unmarshal(b, &all); err != nil {
		return nil, nil, err
	}
	if err := json.Unmarshal(all["weight_map"], &index); err != nil || len(index) == 0 {
		return nil, nil, fmt.Errorf("weight_map: %.40q, want an object of tensors' names with their files'", all["weight_map"])
	}
	names = slices.Compact(slices.Sorted(maps.Values(index)))
	for _, name := range names {
		if name != filepath.Base(name) || len(name) > maxName || !strings.HasSuffix(name, fileName) || strings.HasPrefix(name, ".") {
			return nil, nil, fmt.Errorf("weight_map: file %.80q, want the name of a *%s beside it", name, fileName)
		}
	}
	if len(names) > maxParts {
		return nil, nil, fmt.Errorf("weight_map: %d files, want at most %d", len(names), maxParts)
	}
	return names, index, nil
}

// difference describes a difference between an index and the tensors in the files.
func difference(index, owner map[string]string) string {
	for _, name := range slices.Sorted(maps.Keys(index)) {
		if owner[name] != index[name] {
			return fmt.Sprintf("tensor %.80q: the index has it in %s, the files in %q", name, index[name], owner[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(owner)) {
		if _, ok := index[name]; !ok {
			return fmt.Sprintf("tensor %.80q: it is in %s, and not in the index", name, owner[name])
		}
	}
	return ""
}
