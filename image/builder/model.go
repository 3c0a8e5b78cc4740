package builder

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/request/wire"
	"github.com/stagecoach-serving/stagecoach/tensor/onnx"
	"github.com/stagecoach-serving/stagecoach/tensor/safetensors"
)

// modelStage describes a stage for checkModel.
type modelStage struct {
	language string
	handler  string // folder of the user's files, for messages
	dir      string // folder of the image's files
	ownCode  bool   // the handler has its own code, which may choose among the model's outputs
}

// checkModel returns an error if the function's model is missing from its image, is incomplete, or
// has inputs or outputs that the stage cannot serve.
func checkModel(fn stack.Function, s modelStage) error {
	model, set := fn.Environment[wire.EnvModel]
	field := fmt.Sprintf("environment.%s: ", wire.EnvModel)
	if !set {
		model, field = defaultModel(s.language, s.dir), ""
	}
	switch {
	case model == "":
		return nil
	case !filepath.IsLocal(model):
		return fmt.Errorf("%sgot %q, want a path inside the image, from its root, such as model/model.onnx", field, model)
	}
	file := filepath.Join(s.dir, filepath.FromSlash(model))
	info, err := os.Stat(file)
	switch {
	case errors.Is(err, fs.ErrNotExist) && set:
		return fmt.Errorf("%sgot %q, and there is no %s, want %s", field, model, filepath.Join(s.handler, model), modelsOf(s.dir))
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("model: there is no %s, want the model there, or environment.%s to name %s", filepath.Join(s.handler, model), wire.EnvModel, modelsOf(s.dir))
	case err != nil:
		return fmt.Errorf("model: %w", err)
	case info.IsDir() || filepath.Ext(model) != ".onnx":
		if _, err := safetensors.Inspect(file); err != nil && !errors.Is(err, safetensors.ErrNone) {
			// The error names the handler's folder, because dir is a temporary copy.
			ours := strings.ReplaceAll(err.Error(), s.dir+string(filepath.Separator), filepath.Clean(s.handler)+string(filepath.Separator))
			return fmt.Errorf("model %s: %s", filepath.Join(s.handler, model), ours)
		}
		return nil
	}
	f, err := os.Open(file)
	if err != nil {
		return fmt.Errorf("model: %w", err)
	}
	defer f.Close()
	what := "model " + filepath.Join(s.handler, model)
	files, err := onnx.External(f, info.Size())
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if _, err := onnx.CheckExternal(filepath.Dir(file), files); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if s.language == python3Stage { // its code uses ONNX Runtime itself
		return nil
	}
	inputs, outputs, err := onnx.Signature(f, info.Size())
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	var errs []error
	for i, v := range slices.Concat(inputs, outputs) {
		if err := unserved(v, i < len(inputs), s.ownCode); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	return errors.Join(errs...)
}

// ownCode reports whether a handler's folder has code in Go that is not the template's.
func ownCode(handler string, template fs.FS) bool {
	name, err := packageName(handler)
	if err != nil || name == "" {
		return false
	}
	files, _ := filepath.Glob(filepath.Join(handler, "*.go")) // the pattern is valid
	return slices.ContainsFunc(files, func(file string) bool {
		if strings.HasSuffix(file, "_test.go") {
			return false
		}
		theirs, err := os.ReadFile(file)
		ours, err2 := fs.ReadFile(template, "function/"+filepath.Base(file))
		return err != nil || err2 != nil || !bytes.Equal(theirs, ours)
	})
}

// unserved returns why a stage in Go cannot serve an input or output, and how to fix the model. It
// returns nil if the stage can serve it.
func unserved(v onnx.Value, input, ownCode bool) error {
	what := "output "
	if input {
		what = "input "
	}
	what += strconv.Quote(v.Name)
	switch {
	case v.Served():
		return nil
	case v.Zipped() && !input:
		return fmt.Errorf("%s is a %s, want a tensor: convert the model without the operator ZipMap "+
			`(skl2onnx: to_onnx(..., options={"zipmap": False}), onnxmltools: zipmap=False)`, what, v.Type)
	case !v.Tensor():
		return fmt.Errorf("%s is a %s, want a tensor: convert the model so that its inputs and outputs are tensors", what, v.Type)
	case ownCode && !input: // it may run the model for other outputs
		return nil
	case input:
		return fmt.Errorf("%s is a %s, want a tensor of numbers or bool: move the conversion to numbers from the model into the handler", what, v.Type)
	}
	return fmt.Errorf("%s is a %s, want a tensor of numbers or bool: fit the model with numbers as labels, drop the output "+
		"(onnx.utils.extract_model), or write a handler that runs the model for its other outputs", what, v.Type)
}

// modelsOf returns the wanted value of an error about a missing model: it lists files of the image
// that may be models.
func modelsOf(dir string) string {
	const most = 5
	var found []string
	// Files that cannot be read are left out.
	_ = filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return nil
		case d.IsDir() && d.Name() == siteFolder:
			return fs.SkipDir
		case slices.Contains([]string{".onnx", ".safetensors"}, filepath.Ext(file)) && len(found) < most:
			name, _ := filepath.Rel(dir, file) // it is below dir
			found = append(found, filepath.ToSlash(name))
		}
		return nil
	})
	if len(found) == 0 {
		return "a file or folder of the handler's folder, which has no .onnx or .safetensors file"
	}
	return "a file or folder of the handler's folder, such as " + strings.Join(found, ", ")
}
