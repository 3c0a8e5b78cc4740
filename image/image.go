package image

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// ProtocolLabel says, with the value of its version, that an image's entrypoint speaks the stage protocol.
const (
	ProtocolLabel   = "dev.stagecoach.protocol"
	ProtocolVersion = "1"
)

// Platform is what images are made for and fetched for.
const Platform = "linux/amd64"

// Kinds of faults; errors of this package wrap one of them when it is theirs.
var (
	ErrNoImage     = errors.New("no such image")                    // or none that can be run here: another request would help
	ErrUnavailable = errors.New("the registry cannot be asked now") // trying again may help
)

// Config is what an image says of how it is run.
type Config struct {
	Entrypoint []string // program and arguments
	Env        []string // NAME=value
	WorkDir    string   // absolute; empty: /
	User       string   // user[:group]; empty: root
	Labels     map[string]string
	Port       int    // that it listens on; 0: none
	Platform   string // operating system and architecture; empty: [Platform]
}

// Image is an image that was packed, or is in a store or archive. Its files are read when they are needed.
type Image struct{ of v1.Image }

// Digest is that of the image's manifest, such as sha256:0123….
func (i *Image) Digest() (string, error) {
	h, err := i.of.Digest()
	return h.String(), err
}

// createdBy is the program that an image's history names.
const createdBy = "stagecoach build"

// compose makes an image of layers. Nothing in it depends on when.
func compose(c Config, layers []*layer) (*Image, error) {
	platform, err := v1.ParsePlatform(cmp.Or(c.Platform, Platform))
	if err != nil {
		return nil, fmt.Errorf("platform %q: %w", c.Platform, err)
	}
	adds := make([]mutate.Addendum, len(layers))
	for i, l := range layers {
		adds[i] = mutate.Addendum{Layer: l, History: v1.History{CreatedBy: createdBy, Comment: l.what}}
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	img, err := mutate.Append(base, adds...)
	if err != nil {
		return nil, err
	}
	file, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Variant = platform.OS, platform.Architecture, platform.Variant
	file.Config = v1.Config{
		Entrypoint: c.Entrypoint, Env: c.Env, WorkingDir: cmp.Or(c.WorkDir, "/"), User: c.User, Labels: maps.Clone(c.Labels),
	}
	if c.Port > 0 {
		file.Config.ExposedPorts = map[string]struct{}{strconv.Itoa(c.Port) + "/tcp": {}}
	}
	img, err = mutate.ConfigFile(img, file)
	if err != nil {
		return nil, err
	}
	return &Image{img}, nil
}

// configOf reads how an image is run.
func configOf(f *v1.ConfigFile) Config {
	c := f.Config
	out := Config{
		Entrypoint: slices.Concat(c.Entrypoint, c.Cmd), Env: c.Env, WorkDir: c.WorkingDir, User: c.User, Labels: c.Labels,
		Platform: f.OS + "/" + f.Architecture,
	}
	for port := range c.ExposedPorts {
		if n, err := strconv.Atoi(strings.TrimSuffix(port, "/tcp")); err == nil && (out.Port == 0 || n < out.Port) {
			out.Port = n
		}
	}
	return out
}

// Ref is an image's name, taken apart.
type Ref struct {
	Name   string // [registry/]repository:tag in the form of [Familiar]; the image is stored under it
	Host   string // the registry's host[:port]; empty: it names none
	Digest string // sha256:…; empty: it is not pinned
}

// dockerHub is the host of Docker Hub in names of images.
const dockerHub = "docker.io"

// Familiar returns an image's name without the host of Docker Hub and without library/, its folder
// of official images. So docker.io/team/ocr:1 and team/ocr:1 name the same image, and so do
// index.docker.io/library/redis, library/redis and redis. Names with another registry, and texts
// that are no image's name, are returned unchanged.
func Familiar(name string) string {
	short, _ := trimHub(name)
	return short
}

// trimHub does the same as [Familiar], and reports whether the name has the host of Docker Hub.
func trimHub(name string) (short string, hub bool) {
	short = name
	for _, host := range [...]string{dockerHub + "/", "index." + dockerHub + "/"} {
		if rest, ok := strings.CutPrefix(name, host); ok {
			short, hub = rest, true
			break
		}
	}
	if official, ok := strings.CutPrefix(short, "library/"); ok && official != "" && !strings.Contains(official, "/") {
		return official, hub
	}
	if first, _, ok := strings.Cut(short, "/"); hub && ok && isHost(first) {
		return name, true // without its host, it would name another registry
	}
	return short, hub
}

// isHost reports whether the first of several parts of a name is a registry's host.
func isHost(first string) bool { return strings.ContainsAny(first, ".:") || first == "localhost" }

// Forms of a name's parts.
var (
	digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	hostForm   = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?(:[0-9]{1,5})?$`)
	partForm   = regexp.MustCompile(`^[a-z0-9]+([._-]+[a-z0-9]+)*$`)
	tagForm    = regexp.MustCompile(`^[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}$`)
)

// ParseRef reads [registry/]repository[:tag][@digest]; the tag is latest when there is none.
func ParseRef(s string) (Ref, error) {
	short, hub := trimHub(s)
	full, digest, pinned := strings.Cut(short, "@")
	if pinned && !digestForm.MatchString(digest) {
		return Ref{}, fmt.Errorf("image %q: digest %q, want sha256: and 64 hexadecimal digits", s, digest)
	}
	if !strings.Contains(full[strings.LastIndexByte(full, '/')+1:], ":") {
		full += ":latest"
	}
	r := Ref{Name: full, Digest: digest}
	colon := strings.LastIndexByte(full, ':')
	repository, tag := full[:colon], full[colon+1:]
	if first, rest, ok := strings.Cut(repository, "/"); ok && isHost(first) {
		r.Host, repository = first, rest
	}
	if hub {
		r.Host = dockerHub
	}
	good := tagForm.MatchString(tag) && len(full) <= 255 && (r.Host == "" || hostForm.MatchString(r.Host))
	for part := range strings.SplitSeq(repository, "/") {
		good = good && partForm.MatchString(part)
	}
	if !good {
		return Ref{}, fmt.Errorf("image %q: want [registry/]repository[:tag][@sha256:…], the repository in lower case, such as team/ocr:0.1.0", s)
	}
	return r, nil
}

// String returns the name with its registry, and with its digest if the image is pinned.
func (r Ref) String() string {
	name := r.Name
	if _, hub := trimHub(name); r.Host == dockerHub && !hub {
		name = dockerHub + "/" + name
	}
	if r.Digest != "" {
		name += "@" + r.Digest
	}
	return name
}
