// Package builder makes OCI images of the functions of a stack, without Docker. It combines a
// template, a handler and the SDK that this program contains. It compiles Go stages with the Go
// toolchain. It checks Python stages with a Python interpreter, whose pip installs their
// requirements. The same sources give the same image, whatever folder they are in.
//
//	b, err := builder.New(ctx, stackFile, store)
//	defer b.Close()
//	r, err := b.Build(ctx, "ocr-detect")   // add r.Image to a store, or pass r.Dir to PutFolder
package builder

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/stagecoach-serving/stagecoach"
	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Builder builds the functions of one stack, one after the other.
type Builder struct {
	// Output gets the progress of pip, which may take minutes. nil drops it.
	Output io.Writer
	// SkipImports turns off the import of Python handlers, for modules that are not on this
	// machine.
	SkipImports bool

	stack *stack.File
	store *image.Store
	work  string       // folder for temporary files, on the store's disk
	close func() error // removes work
	tools bool         // the tools were found
}

// New creates a folder for temporary files; Close removes it. The packages of Python stages are
// installed in the store, once for all images.
func New(ctx context.Context, f *stack.File, store *image.Store) (*Builder, error) {
	work, release, err := store.Scratch(ctx)
	if err != nil {
		return nil, err
	}
	return &Builder{stack: f, store: store, work: work, close: release}, nil
}

// Close removes everything that was built.
func (b *Builder) Close() error { return b.close() }

// Result is a function that was built. It is valid until the Builder builds the next function or is
// closed, because models are too large to keep.
type Result struct {
	Dir   string // the image's files
	Image *image.Image
	Size  int64 // total size of the files, in bytes
}

// Build makes the image of a function of the stack. The error says what is wrong with the function,
// or which tool is missing on this machine. It contains the compiler's messages.
func (b *Builder) Build(ctx context.Context, name string) (Result, error) {
	fn := b.stack.Functions[name]
	if fn.Handler == "" {
		return Result{}, errors.New("handler: got none, want the folder with its code")
	}
	handler := b.stack.Path(fn.Handler)
	if info, err := os.Stat(handler); err != nil {
		return Result{}, fmt.Errorf("handler: %w", err)
	} else if !info.IsDir() {
		return Result{}, fmt.Errorf("handler: %s is a file, want a folder", handler)
	}
	template, language, err := Template(b.stack, fn.Lang)
	if err != nil {
		return Result{}, err
	}
	r := Result{Dir: filepath.Join(b.work, "image")}
	if err := os.RemoveAll(r.Dir); err != nil {
		return Result{}, err
	}
	var py *python
	var packages []*image.Layer
	if language == python3Stage {
		py, packages, err = b.pythonStage(ctx, fn, handler, template, r.Dir)
	} else {
		err = b.goStage(ctx, name, handler, template, r.Dir)
	}
	if err == nil {
		err = checkModel(fn, modelStage{language: language, handler: fn.Handler, dir: r.Dir, ownCode: ownCode(handler, template)})
	}
	if err == nil {
		r.Image, err = image.Pack(r.Dir, config(language, r.Dir), packages...)
	}
	for _, l := range packages { // as the image will have them
		if err == nil {
			err = l.LinkInto(ctx, r.Dir)
		}
	}
	if err == nil && py != nil && !b.SkipImports {
		err = py.imports(ctx, fn, r.Dir)
	}
	if err == nil {
		r.Size, err = size(r.Dir)
	}
	return r, err
}

// goStage writes the files of a compiled stage's image.
func (b *Builder) goStage(ctx context.Context, name, handler string, template fs.FS, dir string) error {
	binary := filepath.Join(b.work, "bin", name)
	if err := b.compile(ctx, name, handler, template, binary); err != nil {
		return err
	}
	return b.assemble(dir, handler, binary)
}

// config returns the image configuration of a stage. It has the label that marks the stage
// protocol, the interpreter if the stage is not a binary, and the default model if there is one.
func config(language, dir string) image.Config {
	c := image.Config{Entrypoint: []string{"/" + stageFile}, Labels: map[string]string{image.ProtocolLabel: image.ProtocolVersion}}
	if language == python3Stage {
		c.Env = []string{wire.EnvRuntime + "=python"}
	}
	if m := defaultModel(language, dir); m != "" {
		c.Env = append(c.Env, wire.EnvModel+"="+m)
	}
	return c
}

// defaultModel returns the path of an image's model if the function sets none. It returns an empty
// string if the image has no model.
func defaultModel(language, dir string) string {
	switch language {
	case onnxStage:
		return "model/model.onnx"
	case python3Stage:
		return pythonModel(dir)
	}
	return ""
}

// pythonModel returns the parameters of a Python stage: a file, or the folder model if there may be
// several files.
func pythonModel(dir string) string {
	for _, m := range []struct{ pattern, model string }{
		{"model.safetensors", "model.safetensors"}, {"model/*.safetensors", "model"}, {"model/model.onnx", "model/model.onnx"},
	} {
		// The patterns are valid.
		if found, _ := filepath.Glob(filepath.Join(dir, m.pattern)); len(found) > 0 {
			return m.model
		}
	}
	return ""
}

const (
	goStage      = "go-stage"
	onnxStage    = "onnx-stage"
	python3Stage = "python3-stage"
)

// languages are the languages of templates that need no Docker.
var languages = []string{goStage, onnxStage, python3Stage}

// Template returns the template for a lang of the stack file. It prefers a template that was pulled
// into the folder of the stack file to the one that this program contains. language is the language
// that the template declares.
func Template(f *stack.File, lang string) (t fs.FS, language string, err error) {
	docker := func() error {
		return fmt.Errorf("lang: %q is built with Docker (faas-cli build); without it, want %s, or a template whose template.yml has one of them as its language",
			lang, strings.Join(languages, ", "))
	}
	if !fs.ValidPath(lang) || strings.Contains(lang, "/") || lang == "." {
		return nil, "", docker()
	}
	t, err = fs.Sub(stagecoach.Templates(), lang)
	if pulled := f.Path(filepath.Join("template", lang)); err == nil {
		if _, e := os.Stat(filepath.Join(pulled, "template.yml")); e == nil {
			t = os.DirFS(pulled)
		}
	}
	text, err := fs.ReadFile(t, "template.yml")
	if errors.Is(err, fs.ErrNotExist) {
		return nil, "", docker()
	}
	var said struct{ Language string }
	if err == nil {
		err = yaml.Unmarshal(text, &said)
	}
	if err != nil {
		return nil, "", fmt.Errorf("lang: %s/template.yml: %w", lang, err)
	}
	if !slices.Contains(languages, said.Language) {
		return nil, "", docker()
	}
	return t, said.Language, nil
}
