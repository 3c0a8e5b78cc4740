package image

import (
	"errors"
	"net/http"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// mountingImage is an image to push, and the layers of it that the registry may have in other
// repositories. The registry mounts such layers instead of receiving them.
type mountingImage struct {
	v1.Image

	at map[v1.Hash]name.Reference // by the layer's digest
}

// Layers implements v1.Image.
func (e mountingImage) Layers() ([]v1.Layer, error) {
	layers, err := e.Image.Layers()
	if err != nil {
		return nil, err
	}
	out := make([]v1.Layer, len(layers))
	for i, l := range layers {
		h, err := l.Digest()
		if err != nil {
			return nil, err
		}
		out[i] = l
		if at := e.at[h]; at != nil {
			out[i] = &remote.MountableLayer{Layer: l, Reference: at}
		}
	}
	return out, nil
}

// otherRepositories returns layers of img that the registry of ref may already have in other
// repositories. These are layers that img shares with images of the store whose names are in that
// registry. Some of those images may never have been pushed.
func (s *Store) otherRepositories(r Registry, img *Image, ref name.Reference) (map[v1.Hash]name.Reference, error) {
	m, err := img.of.Manifest()
	if err != nil {
		return nil, err
	}
	wanted := map[v1.Hash]bool{}
	for _, l := range m.Layers {
		wanted[l.Digest] = true
	}
	index, err := s.index()
	if err != nil {
		return nil, err
	}
	out := map[v1.Hash]name.Reference{}
	for _, d := range index.Manifests {
		other, err := r.reference(d.Annotations[refName])
		if err != nil || other.Context().RegistryStr() != ref.Context().RegistryStr() || other.Context().String() == ref.Context().String() {
			continue // an image of no registry, or of another one
		}
		theirs, err := s.Image(d.Digest.String())
		if err != nil {
			continue // an error of another image does not matter here
		}
		manifest, err := theirs.of.Manifest()
		if err != nil {
			continue
		}
		for _, l := range manifest.Layers {
			if wanted[l.Digest] && out[l.Digest] == nil {
				out[l.Digest] = other
			}
		}
	}
	return out, nil
}

// push sends an image, and asks the registry to take layers from its other repositories. If the
// registry refuses, push sends all layers.
func push(ref name.Reference, img *Image, at map[v1.Hash]name.Reference, opts []remote.Option) error {
	err := remote.Write(ref, mountingImage{img.of, at}, opts...)
	var answer *transport.Error
	if len(at) > 0 && errors.As(err, &answer) && answer.StatusCode >= http.StatusBadRequest && answer.StatusCode < http.StatusInternalServerError {
		return remote.Write(ref, img.of, opts...)
	}
	return err
}
