package keysmanager

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor/onnx"
	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

// ErrNoRoom says that parameters do not fit into a node's memory, now or ever.
var ErrNoRoom = errors.New("no room")

// need is what a zygote takes in memory.
type need struct {
	bytes int64
	of    string // where the number comes from
}

// needShare is what a zygote takes with its parameters and its engine's base: one part in so many of the former.
const needShare = 32

// need returns what the zygote of an image is going to take: what it took before, or else by the sizes of its model's files. A model that
// is not there, or not all of it, is an error here already.
func (m *Manager) need(key zygoteKey, image sandbox.Image) (need, error) {
	key.generation = 0
	m.mu.Lock()
	known, ok := m.sizes[key]
	m.mu.Unlock()
	if ok {
		return need{known, "as it took before"}, nil
	}
	base := key.engine().base
	if key.model == "" {
		return need{base, "no model"}, nil
	}
	bytes, of, err := parameters(image.Root, key.model)
	if err != nil {
		return need{}, fmt.Errorf("image %q: %w", image.Name, err)
	}
	return need{bytes + bytes/needShare + base, of}, nil
}

// ErrModelMissing says that an image lacks the file or folder that its model should be.
var ErrModelMissing = errors.New("there is no")

// CheckModel checks the files of a model below an image's root as a start does before it loads
// them. It reads headers only. Without a model there is nothing to check.
func CheckModel(root, model string) error {
	if model == "" {
		return nil
	}
	_, _, err := parameters(root, model)
	return err
}

// parameters returns how many bytes the files of a model have, and says which ones they are. Of what is by its name neither an
// ONNX model nor safetensors, it is the size of the file or of a folder's files.
func parameters(root, model string) (bytes int64, of string, err error) {
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
	if !info.IsDir() && !info.Mode().IsRegular() { // a function names it: opening a pipe would wait, a device may do anything
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

// inFolder returns how many bytes the files of a folder have.
func inFolder(path string) (bytes int64) {
	entries, _ := os.ReadDir(path) // what cannot be read is found when it is loaded
	for _, e := range entries {
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			bytes += info.Size()
		}
	}
	return bytes
}

// keeper is who has memory.
type keeper struct {
	name  string
	bytes int64
}

// refusal says why a zygote is not loaded: what it needs, what is there, and who has it.
func refusal(function string, n need, m memory, own int64, busy, loading []keeper) error {
	b, room := m.tightest(Threshold)
	limit := int64(float64(b.total) * Threshold)
	var s strings.Builder
	fmt.Fprintf(&s, "zygote of %q needs about %s (%s), ", function, plan.Size(n.bytes), n.of)
	free := max(0, room-m.coming)
	fmt.Fprintf(&s, "%s are free of %s (%.0f %% of %s, %s)", plan.Size(free), plan.Size(limit), 100*Threshold, plan.Size(b.total), b.name)
	held := func(what string, by []keeper) {
		slices.SortFunc(by, func(x, y keeper) int { return cmp.Or(cmp.Compare(y.bytes, x.bytes), cmp.Compare(x.name, y.name)) })
		sum, names := int64(0), []string{}
		for i, h := range by {
			sum += h.bytes
			if i < 5 {
				names = append(names, fmt.Sprintf("%s %s", h.name, plan.Size(h.bytes)))
			} else if i == 5 {
				names = append(names, "…")
			}
		}
		if len(by) > 0 {
			fmt.Fprintf(&s, "; %s are %s: %s", plan.Size(sum), what, strings.Join(names, ", "))
		}
	}
	held("held by zygotes with replicas", busy)
	held("kept for loads under way", loading)
	if others := b.used - own; b.name != boundOwn && others > 0 {
		fmt.Fprintf(&s, "; %s are used by other processes", plan.Size(others))
	}
	switch {
	case n.bytes > limit:
		fmt.Fprintf(&s, "; it can never fit here: use a node with more memory")
	case b.name == boundOwn:
		s.WriteString("; scale other functions down, or raise --memory")
	default:
		s.WriteString("; scale other functions down, or use a node with more memory")
	}
	return fmt.Errorf("%w: %s", ErrNoRoom, s.String())
}
