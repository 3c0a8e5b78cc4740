package builder

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/image"
)

// A wheel of at least bigWheel bytes gets its own layer, so that images share it even if their
// other packages differ. maxOwn bounds the number of these layers, because other tools allow an
// image at most 127 layers.
const (
	bigWheel = 4 << 20
	maxOwn   = 40
)

// layersVersion is increased when the same wheels no longer give the same files.
const layersVersion = 1

// wheel is a package that pip has chosen.
type wheel struct {
	File string // its name
	Hash string // SHA-256 of its content
	Size int64  // in bytes
}

// errNoWheel reports that a wheel is no longer kept, or that its content has changed.
var errNoWheel = errors.New("no such wheel is kept")

// layers returns the layers with installed wheels. It takes layers from the store if the store has
// them, and makes the others from the wheels in a folder.
func (p *python) layers(ctx context.Context, handler, folder string, all []wheel) ([]*image.Layer, error) {
	if len(all) == 0 { // environment markers exclude every package
		return nil, nil
	}
	identity, err := p.identity(ctx)
	if err != nil {
		return nil, err
	}
	own, rest := split(all)
	var out []*image.Layer
	add := func(what string, wheels ...wheel) error {
		list, err := json.Marshal(wheels)
		if err != nil {
			return err
		}
		key := fmt.Sprintf("packages %d %x %q %s", layersVersion, sha256.Sum256(preparePy), identity, list)
		l, err := p.builder.store.MakeLayer(ctx, key, what, func(root string) error {
			return p.fill(ctx, handler, folder, root, wheels)
		})
		out = append(out, l)
		return err
	}
	for _, w := range own {
		if err := add(strings.TrimSuffix(w.File, ".whl"), w); err != nil {
			return nil, err
		}
	}
	if len(rest) > 0 {
		if err := add("other", rest...); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// split returns the wheels that get a layer each, and those that share one. Both lists are sorted
// by name.
func split(all []wheel) (own, rest []wheel) {
	bySize := slices.SortedFunc(slices.Values(all), func(a, b wheel) int { return cmp.Or(cmp.Compare(b.Size, a.Size), cmp.Compare(a.File, b.File)) })
	for i, w := range bySize {
		if w.Size >= bigWheel && i < maxOwn {
			own = append(own, w)
		} else {
			rest = append(rest, w)
		}
	}
	byName := func(a, b wheel) int { return cmp.Compare(a.File, b.File) }
	slices.SortFunc(own, byName)
	slices.SortFunc(rest, byName)
	return own, rest
}

// fill installs wheels into the folder of a layer.
func (p *python) fill(ctx context.Context, handler, folder, root string, wheels []wheel) error {
	site := filepath.Join(root, siteFolder)
	args := []string{"install", "--target", site, "--no-index", "--no-deps", "--no-compile", "--no-user"}
	for _, w := range wheels {
		file := filepath.Join(folder, w.File)
		if hash, err := hashFile(file); err != nil || hash != w.Hash {
			return fmt.Errorf("%w: %s", errNoWheel, file)
		}
		args = append(args, file)
	}
	if err := p.pip(ctx, handler, args...); err != nil {
		return err
	}
	if err := normalise(site); err != nil {
		return fmt.Errorf("%s: %w", siteFolder, err)
	}
	return p.prepare(ctx, "packages", root)
}

// identity returns a text that differs between interpreters for which the same wheel gives
// different files.
func (p *python) identity(ctx context.Context) (string, error) {
	const code = "import sys, sysconfig; print(sys.version, sys.implementation.cache_tag, sysconfig.get_platform())"
	out, err := p.cmd(ctx, "-c", code).Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w%s", p.what, err, stderrOf(err))
	}
	return string(out), nil
}
