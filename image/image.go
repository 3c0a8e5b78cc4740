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

// ProtocolLabel is the label of images whose entrypoint speaks the stage protocol. Its value is the
// protocol's version.
const (
	ProtocolLabel   = "dev.stagecoach.protocol"
	ProtocolVersion = "1"
)

// Platform is the platform that images are made and fetched for.
const Platform = "linux/amd64"

// Kinds of errors. Errors of this package wrap one of them if it applies.
var (
	// The image does not exist, or this machine cannot run it; another name may help.
	ErrNoImage     = errors.New("no such image")
	ErrUnavailable = errors.New("the registry cannot be asked now") // trying again may help
)

// Config says how an image is run.
type Config struct {
	Entrypoint []string // program and arguments
	Env        []string // NAME=value
	WorkDir    string   // absolute; empty: /
	User       string   // user[:group]; empty: root
	Labels     map[string]string
	Port       int    // port that it listens on; 0: none
	Platform   string // operating system and architecture; empty: [Platform]
}

// Image is an image that was packed, or is in a store or archive. Its files are read on demand.
type Image struct{ of v1.Image }

// Digest returns the digest of the image's manifest, such as sha256:0123….
func (i *Image) Digest() (string, error) {
	h, err := i.of.Digest()
	return h.String(), err
}

// createdBy is the program in an image's history.
const createdBy = "stagecoach build"

// compose makes an image of layers. The result does not depend on the time.
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

// configOf returns how an image is run.
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

// Ref is the parsed name of an image.
type Ref struct {
	Name   string // [registry/]repository:tag in the form of [Familiar]; the store uses this name
	Host   string // the registry's host[:port]; empty: the name has no registry
	Digest string // sha256:…; empty: the name is not pinned
}

// dockerHub is the host of Docker Hub in names of images.
const dockerHub = "docker.io"

// Familiar returns an image's name without the host of Docker Hub and without library/, its folder
// of official images. So docker.io/team/ocr:1 becomes team/ocr:1, and index.docker.io/library/redis
// becomes redis. Names with another registry, and texts that are not image names, are returned
// unchanged.
func Familiar(name string) string {
	short, _ := trimHub(name)
	return short
}

// trimHub does what [Familiar] does, and reports whether the name has the host of Docker Hub.
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

// isHost reports whether the first part of a name with several parts is a registry's host.
func isHost(first string) bool { return strings.ContainsAny(first, ".:") || first == "localhost" }

// Forms of the parts of a name.
var (
	digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	hostForm   = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?(:[0-9]{1,5})?$`)
	partForm   = regexp.MustCompile(`^[a-z0-9]+([._-]+[a-z0-9]+)*$`)
	tagForm    = regexp.MustCompile(`^[a-zA-Z0-9_][a-zA-Z0-9._-]{0,127}$`)
)

// ParseRef parses [registry/]repository[:tag][@digest]. Without a tag, the tag is latest.
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
