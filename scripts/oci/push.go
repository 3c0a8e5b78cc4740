package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// readLayout returns the index in an OCI layout that writeLayout has written, and its tag.
func readLayout(folder string) (v1.ImageIndex, string, error) {
	all, err := layout.ImageIndexFromPath(folder)
	if err != nil {
		return nil, "", fmt.Errorf("%s: %w: run make images-oci", folder, err)
	}
	m, err := all.IndexManifest()
	if err != nil {
		return nil, "", err
	}
	if len(m.Manifests) != 1 || m.Manifests[0].Annotations[refName] == "" {
		return nil, "", fmt.Errorf("%s has %d images, want one with a name", folder, len(m.Manifests))
	}
	index, err := all.ImageIndex(m.Manifests[0].Digest)
	return index, m.Manifests[0].Annotations[refName], err
}

// push sends all images to REGISTRY/NAME:TAG, with the credentials of docker login.
func push(ctx context.Context, folder, registry, tag string, insecure bool, log io.Writer) error {
	var opts []name.Option
	if insecure {
		opts = append(opts, name.Insecure)
	}
	for _, image := range names {
		index, built, err := readLayout(filepath.Join(folder, image))
		if err != nil {
			return err
		}
		ref, err := name.NewTag(strings.TrimSuffix(registry, "/")+"/"+image+":"+cmp.Or(tag, built), opts...)
		if err != nil {
			return err
		}
		if err := remote.WriteIndex(ref, index, remote.WithContext(ctx), remote.WithAuthFromKeychain(authn.DefaultKeychain)); err != nil {
			return fmt.Errorf("push %s: %w", ref, err)
		}
		digest, err := index.Digest()
		if err != nil {
			return err
		}
		fmt.Fprintf(log, "%s@%s\n", ref, digest)
	}
	return nil
}
