package cli

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/image/builder"
	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/console"
)

// DefaultState is the state folder of `stagecoach up` if no flag and no file names another.
const DefaultState = ".stagecoach"

// stackFlags adds the flags of all commands that read a stack file.
func stackFlags(fs *flag.FlagSet) (file, filter *string) {
	return fs.String("f", "", "stack file; default stack.yml or stack.yaml"), fs.String("filter", "", "only the functions of this name, in which * stands for anything")
}

// stackFile returns the stack file that a command reads: the one that the user has named, or else
// stack.yml or stack.yaml.
func stackFile(named string) string {
	if named != "" {
		return named
	}
	if _, err := os.Stat("stack.yml"); errors.Is(err, os.ErrNotExist) {
		if _, err := os.Stat("stack.yaml"); err == nil {
			return "stack.yaml"
		}
	}
	return "stack.yml"
}

// openStack reads the stack file and returns the names of the functions that match filter.
func openStack(file, filter string) (*stack.File, []string, error) {
	file = stackFile(file)
	f, err := stack.Read(file)
	if err != nil {
		return nil, nil, err
	}
	names, err := f.Names(filter)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", file, err)
	}
	return f, names, nil
}

// retag gives an image another tag, in place of its tag and digest; "" leaves it.
func retag(image, tag string) string {
	if tag == "" || image == "" {
		return image
	}
	image, _, _ = strings.Cut(image, "@")
	if i := strings.LastIndexByte(image, ':'); i > strings.LastIndexByte(image, '/') {
		image = image[:i]
	}
	return image + ":" + tag
}

// built describes the image that was built of a function.
type built struct {
	Function string  `json:"function"`
	Image    string  `json:"image"`
	Size     int64   `json:"size"` // bytes of its files
	Digest   string  `json:"digest"`
	Seconds  float64 `json:"seconds"`
}

// Build makes OCI images of a stack's functions. It needs no gateway.
func Build(ctx context.Context, args []string, out io.Writer) error {
	fs := flag.NewFlagSet("build", flag.ContinueOnError)
	file, filter := stackFlags(fs)
	tag := fs.String("tag", "", "tag of the images, in place of that in the stack file")
	images := fs.String("images", filepath.Join(DefaultState, "images"), "where they go: the folder that up --images has")
	folder := fs.Bool("folder", false, "put them there as folders REPOSITORY/TAG, for development, and not into the store of OCI images")
	archive := fs.String("out", "", "a file to write the OCI images to as well, for another machine")
	imports := fs.Bool("check-imports", true, "import each Python handler with the interpreter that runs it; a missing module is an error")
	asJSON := console.JSONFlag(fs)
	if err := console.ParseFlags(fs, args); err != nil {
		return err
	}
	f, names, err := openStack(*file, *filter)
	if err != nil {
		return err
	}
	if *folder && *archive != "" {
		return errors.New("build: got --folder and --out, want one: an archive holds OCI images")
	}
	store, err := image.OpenStore(image.Folder(*images)) // folders, too, take their packages from it
	if err != nil {
		return err
	}
	defer store.Close()
	dest := &destination{folder: *images}
	if !*folder {
		dest.store = store
	}
	b, err := builder.New(ctx, f, store)
	if err != nil {
		return err
	}
	defer b.Close()
	b.Output, b.SkipImports = os.Stderr, !*imports
	var all []built
	var failed []error
	for _, name := range names {
		fn := f.Functions[name]
		if fn.SkipBuild {
			console.Progress("build: %s: skip_build", name)
			continue
		}
		console.Progress("build: %s: compiling %s", name, fn.Handler)
		begin := time.Now()
		done, err := buildOne(ctx, b, name, retag(fn.Image, *tag), dest)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("functions.%s: %w", name, err))
			console.Progress("build: %s: failed", name)
			continue
		}
		done.Seconds = time.Since(begin).Seconds()
		all = append(all, done)
		console.Progress("build: %s: %s in %.1f s", name, done.Image, done.Seconds)
	}
	if err := printBuilt(all, *asJSON, out); err != nil {
		return err
	}
	if *archive != "" && len(all) > 0 && len(failed) == 0 {
		if err := dest.save(ctx, *archive, all); err != nil {
			return err
		}
	}
	return errors.Join(failed...)
}

// destination gets the images: a store of OCI images, or if that is nil, a folder of folders.
type destination struct {
	store  *image.Store
	folder string
}

func (d *destination) put(ctx context.Context, r builder.Result, ref string) (digest string, err error) {
	if d.store != nil {
		return d.store.Add(ctx, r.Image, ref)
	}
	if digest, err = r.Image.Digest(); err != nil {
		return "", err
	}
	return digest, builder.PutFolder(d.folder, image.Familiar(ref), r.Dir)
}

// save writes the images to a file.
func (d *destination) save(ctx context.Context, file string, all []built) error {
	names := make([]string, len(all))
	for i, b := range all {
		names[i] = b.Image
	}
	return saveImages(ctx, d.store, file, names)
}

func printBuilt(all []built, asJSON bool, out io.Writer) error {
	if asJSON {
		return json.NewEncoder(out).Encode(append([]built{}, all...)) // [] and not null
	}
	if len(all) == 0 {
		return nil
	}
	t := console.NewTable(out)
	fmt.Fprintln(t, "FUNCTION\tIMAGE\tSIZE\tDIGEST")
	for _, b := range all {
		fmt.Fprintf(t, "%s\t%s\t%s\t%.19s\n", b.Function, b.Image, sizeText(b.Size), b.Digest)
	}
	return t.Flush()
}

// sizeText formats a number of bytes, in KiB, MiB or GiB.
func sizeText(n int64) string {
	switch {
	case n >= 1<<30:
		return fmt.Sprintf("%.1f GiB", float64(n)/(1<<30))
	case n >= 1<<20:
		return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
	}
	return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
}

// buildOne makes the image of one function, and puts it into the destination.
func buildOne(ctx context.Context, b *builder.Builder, name, ref string, to *destination) (built, error) {
	if ref == "" {
		return built{}, errors.New("image: none, want the name of the image to build")
	}
	r, err := b.Build(ctx, name)
	if err != nil {
		return built{}, err
	}
	digest, err := to.put(ctx, r, ref)
	return built{Function: name, Image: ref, Size: r.Size, Digest: digest}, err
}
