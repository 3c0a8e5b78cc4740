package resources

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor/onnx"
	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

// ErrModelMissing means that an image lacks the file or folder of its model.
var ErrModelMissing = errors.New("there is no")

// CheckModel checks the files of a model below an image's root as a start does before it loads
// them. It reads headers only. Without a model there is nothing to check.
func CheckModel(root, model string) error {
	if model == "" {
		return nil
	}
	_, _, err := Parameters(root, model)
	return err
}

// Parameters returns the size of a model's files in bytes, and a text that says which files they
// are. model is a path in the image, from its root. If the model is neither ONNX nor safetensors,
// the size is that of the file, or of all files in the folder.
func Parameters(root, model string) (bytes int64, of string, err error) {
	path := model
	if !filepath.IsAbs(path) {
		path = filepath.Join(root, path)
	}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, "", fmt.Errorf("model %s: %w %s, want %s to be the path of a file or folder in the image, from its root", model, ErrModelMissing, path, wire.EnvModel)
	}
	if err != nil {
		return 0, "", fmt.Errorf("model %s: %w", model, err)
	}
	bytes, of = info.Size(), "model file "+plan.Size(info.Size())
	// A function names the path: opening a pipe would block, and a device could have side effects.
	if !info.IsDir() && !info.Mode().IsRegular() {
		return 0, "", fmt.Errorf("model %s: %v, want a file or folder", model, info.Mode())
	}
	if info.IsDir() || filepath.Ext(path) != ".onnx" {
		switch m, err := safetensors.Inspect(path); {
		case err == nil:
			return m.Bytes, fmt.Sprintf("%d model files %s", len(m.Parts), plan.Size(m.Bytes)), nil
		case !errors.Is(err, safetensors.ErrNone):
			return 0, "", fmt.Errorf("model %s: %w; build the image again", model, err)
		case info.IsDir():
			bytes = inFolder(path)
		}
		return bytes, "model " + plan.Size(bytes), nil
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return 0, "", fmt.Errorf("model %s: %w", model, err)
	}
	defer f.Close()
	files, err := onnx.External(f, info.Size())
	if err != nil {
		return 0, "", fmt.Errorf("model %s: %w; build the image again", model, err)
	}
	outside, err := onnx.CheckExternal(filepath.Dir(path), files)
	if err != nil {
		return 0, "", fmt.Errorf("model %s: %w; build the image again", model, err)
	}
	if outside > 0 {
		of += fmt.Sprintf(" and %s of external data", plan.Size(outside))
	}
	return bytes + outside, of, nil
}

// inFolder returns the total size of the files in a folder, in bytes.
func inFolder(path string) (bytes int64) {
	entries, _ := os.ReadDir(path) // the load reports files that cannot be read
	for _, e := range entries {
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			bytes += info.Size()
		}
	}
	return bytes
}
