// Package builder makes OCI images of the functions of a stack, without Docker: it lays a template and a handler together,
// compiles them with the Go toolchain against the SDK that this program carries, and packs the result. The same sources give
// the same image, wherever they lie.
//
//	b, err := builder.New(stackFile)
//	defer b.Close()
//	r, err := b.Build(ctx, "ocr-detect")   // r.Image into a store, or r.Dir into a folder: PutFolder
package builder

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/stagecoach-serving/stagecoach"
	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/stack"
	"github.com/stagecoach-serving/stagecoach/wire"
)

// Builder builds the functions of one stack, one after the other.
type Builder struct {
	stack *stack.File
	work  string // scratch
	tools bool   // they were found
}

// New makes a folder for scratch; Close removes it.
func New(f *stack.File) (*Builder, error) {
	work, err := os.MkdirTemp("", "stagecoach-build-")
	if err != nil {
		return nil, err
	}
	return &Builder{stack: f, work: work}, nil
}

// Close removes all that was built.
func (b *Builder) Close() error { return os.RemoveAll(b.work) }

// Result is a function that was built. It can be used until the Builder is closed.
type Result struct {
	Dir   string // the image's files
	Image *image.Image
	Size  int64 // of the files, bytes
}

// Build makes the image of a function of the stack. An error says what of the function is wrong, or what is missing on this
// machine; the compiler's messages are in it.
func (b *Builder) Build(ctx context.Context, name string) (Result, error) {
	fn := b.stack.Functions[name]
	if fn.Handler == "" {
		return Result{}, errors.New("handler: none, want the folder with its code")
	}
	handler := b.stack.Path(fn.Handler)
	if info, err := os.Stat(handler); err != nil {
		return Result{}, fmt.Errorf("handler: %w", err)
	} else if !info.IsDir() {
		return Result{}, fmt.Errorf("handler: %s is a file, want a folder", handler)
	}
	template, language, err := b.template(fn.Lang)
	if err != nil {
		return Result{}, err
	}
	binary := filepath.Join(b.work, "bin", name)
	if err := b.compile(ctx, name, handler, template, binary); err != nil {
		return Result{}, err
	}
	r := Result{Dir: filepath.Join(b.work, "images", name)}
	if err := os.RemoveAll(r.Dir); err != nil {
		return Result{}, err
	}
	if r.Size, err = b.assemble(r.Dir, handler, binary); err != nil {
		return Result{}, err
	}
	r.Image, err = image.Pack(r.Dir, config(language))
	return r, err
}

// config says that the image speaks the stage protocol and, for a template of models, which file is the model unless the
// function says otherwise.
func config(language string) image.Config {
	c := image.Config{Entrypoint: []string{"/" + stageFile}, Labels: map[string]string{image.ProtocolLabel: image.ProtocolVersion}}
	if language == onnxStage {
		c.Env = []string{wire.EnvModel + "=model/model.onnx"}
	}
	return c
}

const (
	goStage   = "go-stage"
	onnxStage = "onnx-stage"
)

// template finds the folder of a lang, pulled beside the stack file, or the one that this program carries, and what it says that
// it is.
func (b *Builder) template(lang string) (t fs.FS, language string, err error) {
	docker := func() error {
		return fmt.Errorf("lang: %q is built with Docker (faas-cli build); without it, want %s or %s, or a template whose template.yml has one of them as its language",
			lang, goStage, onnxStage)
	}
	if !fs.ValidPath(lang) || strings.Contains(lang, "/") || lang == "." {
		return nil, "", docker()
	}
	t, err = fs.Sub(stagecoach.Templates(), lang)
	if pulled := b.stack.Path(filepath.Join("template", lang)); err == nil {
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
	if !slices.Contains([]string{goStage, onnxStage}, said.Language) {
		return nil, "", docker()
	}
	return t, said.Language, nil
}
