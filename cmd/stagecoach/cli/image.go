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
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/image"
	"github.com/stagecoach-serving/stagecoach/internal/console"
)

// imageCommand has the store and the flags of `stagecoach image`.
type imageCommand struct {
	store    *image.Store
	registry image.Registry
	name     string // for an archive that names none
	asJSON   bool
	out      io.Writer
}

// ImageVerbs returns the verbs of `stagecoach image`, each with its arguments.
func ImageVerbs() []string {
	return []string{"list", "load FILE", "save FILE NAME ...", "pull NAME ...", "push NAME ...", "remove NAME ..."}
}

// Image works on a store of OCI images. It needs no gateway.
func Image(ctx context.Context, args []string, out io.Writer) error {
	known := slices.IndexFunc(ImageVerbs(), func(v string) bool { return len(args) > 0 && strings.Fields(v)[0] == args[0] })
	if known < 0 {
		return fmt.Errorf("image: got %q, want one of: %s", args, strings.Join(ImageVerbs(), ", "))
	}
	verb, form := args[0], ImageVerbs()[known]
	fs := flag.NewFlagSet("image "+verb, flag.ContinueOnError)
	folder := fs.String("images", filepath.Join(DefaultState, "images"), "the folder that up --images has")
	c := imageCommand{out: out}
	switch verb {
	case "list":
		fs.BoolVar(&c.asJSON, "json", false, "print JSON instead of a table")
	case "load":
		fs.StringVar(&c.name, "name", "", "of the only image of an archive that names none")
	case "pull", "push":
		fs.StringVar(&c.registry.Auth, "registry-config", "", "file with credentials for registries; default ~/.docker/config.json, or DOCKER_CONFIG/config.json")
		fs.Var((*console.Repeated)(&c.registry.Insecure), "insecure", "host[:port] of a registry without TLS; may be repeated; loopback addresses need none")
	}
	rest, err := console.ParseMixed(fs, args[1:])
	if err != nil {
		return err
	}
	if least := map[string]int{"load": 1, "save": 2, "pull": 1, "push": 1, "remove": 1}[verb]; len(rest) < least || verb == "list" && len(rest) > 0 || verb == "load" && len(rest) > 1 {
		return fmt.Errorf("image %s: got %q, want: stagecoach image %s", verb, rest, form)
	}
	if c.store, err = image.OpenStore(image.Folder(*folder)); err != nil {
		return err
	}
	defer c.store.Close()
	switch verb {
	case "list":
		return c.list()
	case "load":
		return c.load(ctx, rest[0])
	case "save":
		return saveImages(ctx, c.store, rest[0], rest[1:])
	case "pull":
		return c.pull(ctx, rest)
	case "push":
		return c.push(ctx, rest)
	default:
		return c.remove(ctx, rest)
	}
}

func (c *imageCommand) list() error {
	all, err := c.store.List()
	if err != nil {
		return err
	}
	if c.asJSON {
		type entry struct {
			Image  string    `json:"image"`
			Digest string    `json:"digest"`
			Size   int64     `json:"size"` // bytes
			Added  time.Time `json:"added"`
		}
		out := []entry{}
		for _, e := range all {
			out = append(out, entry{e.Name, e.Digest, e.Size, e.Added.UTC().Truncate(time.Second)})
		}
		return json.NewEncoder(c.out).Encode(out)
	}
	t := console.NewTable(c.out)
	fmt.Fprintln(t, "IMAGE\tSIZE\tDIGEST\tADDED")
	for _, e := range all {
		fmt.Fprintf(t, "%s\t%s\t%.19s\t%s\n", e.Name, sizeText(e.Size), e.Digest, e.Added.UTC().Format(time.RFC3339))
	}
	return t.Flush()
}

func (c *imageCommand) load(ctx context.Context, file string) error {
	all, err := c.store.Load(ctx, file, c.name)
	for _, e := range all { // also after an error: the images before the bad one are loaded
		fmt.Fprintf(c.out, "%s: loaded, %s\n", e.Name, e.Digest)
	}
	return err
}

// saveImages writes an archive of images. After an error it leaves no file.
func saveImages(ctx context.Context, store *image.Store, file string, names []string) (err error) {
	f, err := os.CreateTemp(filepath.Dir(file), ".stagecoach-image-")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.Remove(f.Name()))
		}
	}()
	if err = errors.Join(store.Save(ctx, f, names...), f.Chmod(0o644), f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), file)
}

// pull fetches images and stores them under their names. Deploys then ask no registry.
func (c *imageCommand) pull(ctx context.Context, names []string) error {
	var errs []error
	for _, name := range names {
		digest, err := c.registry.Pull(ctx, c.store, name)
		var img *image.Image
		if err == nil {
			img, err = c.store.Image(digest)
		}
		if err == nil {
			_, err = c.store.Add(ctx, img, name)
		}
		if err == nil {
			fmt.Fprintf(c.out, "%s: pulled, %s\n", name, digest)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (c *imageCommand) push(ctx context.Context, names []string) error {
	var errs []error
	for _, name := range names {
		digest, err := c.registry.Push(ctx, c.store, name)
		if err == nil {
			fmt.Fprintf(c.out, "%s: pushed, %s\n", name, digest)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func (c *imageCommand) remove(ctx context.Context, names []string) error {
	var errs []error
	for _, name := range names {
		err := c.store.Remove(ctx, name)
		if err == nil {
			fmt.Fprintf(c.out, "%s: removed\n", name)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
