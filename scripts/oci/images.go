package main

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

const (
	website = "https://github.com/stagecoach-serving/stagecoach"
	user    = 65532 // as distroless images have it
	home    = "var/lib/stagecoach"
	ort     = "build/ort/libonnxruntime.so.1"
	refName = "org.opencontainers.image.ref.name"
)

// names are the images, each an OCI layout in a folder of this name.
var names = []string{"stagecoach", "stagecoach-init"}

// variant is an image for one architecture.
type variant struct {
	name, arch  string
	description string
	config      v1.Config
	layers      []v1.Layer
	bill        bill
}

// build makes all images and writes them below out. It returns the digest of each index.
func build(ctx context.Context, s source, cache, out string, log io.Writer) (map[string]string, error) {
	tmp, err := os.MkdirTemp("", "stagecoach-oci-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(tmp)
	whole, err := s.whole(ctx, cache, tmp)
	if err != nil {
		return nil, err
	}
	variants := []variant{whole}
	for _, arch := range []string{"amd64", "arm64"} {
		v, err := s.initOnly(ctx, arch, tmp)
		if err != nil {
			return nil, err
		}
		variants = append(variants, v)
	}
	digests := map[string]string{}
	for _, name := range names {
		index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
		for _, v := range variants {
			if v.name != name {
				continue
			}
			img, err := s.compose(v)
			if err != nil {
				return nil, err
			}
			platform := &v1.Platform{OS: "linux", Architecture: v.arch}
			index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: platform}})
			if err := report(log, v, img); err != nil {
				return nil, err
			}
			if err := writeFile(filepath.Join(out, name+"."+v.arch+".spdx.json"), v.bill.json(s)); err != nil {
				return nil, err
			}
		}
		index = mutate.Annotations(index, s.labels(name, descriptions[name])).(v1.ImageIndex)
		digest, err := index.Digest()
		if err != nil {
			return nil, err
		}
		if err := writeLayout(filepath.Join(out, name), index, s.tag()); err != nil {
			return nil, err
		}
		digests[name] = digest.String()
		fmt.Fprintf(log, "%s:%s %s\n", name, s.tag(), digest)
	}
	return digests, nil
}

// descriptions say what each image is for.
var descriptions = map[string]string{
	"stagecoach":      "Stagecoach: control plane, gateway, KeysManager and CLI",
	"stagecoach-init": "The first program of Stagecoach's containers, linked statically",
}

// whole makes the image stagecoach: the program, and what it and stages need of a machine.
func (s source) whole(ctx context.Context, cache, tmp string) (v variant, err error) {
	debs, err := readLock(filepath.Join(s.root, lockFile))
	if err != nil {
		return v, err
	}
	base, err := debianFiles(ctx, debs, cache)
	if err != nil {
		return v, err
	}
	runtime, err := s.onnxRuntime()
	if err != nil {
		return v, err
	}
	main, init := filepath.Join(tmp, "stagecoach"), filepath.Join(tmp, "stagecoach-init-amd64")
	if err := errors.Join(s.compile(ctx, "./cmd/stagecoach", "amd64", true, main), s.compile(ctx, "./cmd/stagecoach-init", "amd64", false, init)); err != nil {
		return v, err
	}
	if err := checkLibc(main, debs); err != nil {
		return v, err
	}
	v = variant{
		name: "stagecoach", arch: "amd64", description: descriptions["stagecoach"],
		config: v1.Config{
			Entrypoint: []string{"/usr/bin/stagecoach"}, Cmd: []string{"--help"}, WorkingDir: "/" + home,
			User: fmt.Sprintf("%d:%d", user, user), ExposedPorts: map[string]struct{}{"8080/tcp": {}},
			Env: []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/" + home},
		},
		bill: bill{name: "stagecoach", debs: debs},
	}
	if err := v.bill.add(main, init); err != nil {
		return v, err
	}
	onnx, err := s.onnxVersion()
	if err != nil {
		return v, err
	}
	v.bill.onnx(onnx, runtime.data)
	licence, err := os.ReadFile(filepath.Join(s.root, "LICENSE"))
	if err != nil {
		return v, err
	}
	one, err := program("usr/bin/stagecoach", main)
	if err != nil {
		return v, err
	}
	two, err := program("usr/bin/stagecoach-init", init)
	if err != nil {
		return v, err
	}
	const doc = "usr/share/doc/stagecoach/"
	ours := []file{one, two, text(doc+"copyright", string(licence)), text(doc+"sbom.spdx.json", string(v.bill.json(s)))}
	return v, v.add(append(base, system()...), []file{runtime}, ours)
}

// system returns the files that every Linux program may expect, and the folders that are written to
// or mounted over.
func system() []file {
	passwd := fmt.Sprintf("root:x:0:0:root:/root:/sbin/nologin\nnobody:x:65534:65534:nobody:/nonexistent:/sbin/nologin\n"+
		"stagecoach:x:%d:%d:stagecoach:/%s:/sbin/nologin\n", user, user, home)
	group := fmt.Sprintf("root:x:0:\nnogroup:x:65534:\nstagecoach:x:%d:\n", user)
	files := []file{
		text("etc/passwd", passwd), text("etc/group", group),
		text("etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files dns\n"),
		{name: "etc/localtime", kind: tar.TypeSymlink, link: "/usr/share/zoneinfo/Etc/UTC"},
		folder("tmp", 0o1777, 0), folder("var/tmp", 0o1777, 0), folder("root", 0o700, 0), folder(home, 0o755, user),
	}
	for _, empty := range []string{"dev", "proc", "run", "sys", "usr/sbin", "bin", "sbin"} {
		files = append(files, folder(empty, 0o755, 0))
	}
	return files
}

// onnxRuntime returns the library that `make fetch` has fetched.
func (s source) onnxRuntime() (file, error) {
	b, err := os.ReadFile(filepath.Join(s.root, ort))
	if err != nil {
		return file{}, fmt.Errorf("ONNX Runtime: %w: run make fetch", err)
	}
	sums, err := os.ReadFile(filepath.Join(s.root, "scripts/fetch.sha256"))
	if err != nil {
		return file{}, err
	}
	sum := sha256.Sum256(b)
	if !strings.Contains(string(sums), hex.EncodeToString(sum[:])+"  libonnxruntime.so.1-x64\n") {
		return file{}, fmt.Errorf("%s: SHA-256 %x, want that of libonnxruntime.so.1-x64 in scripts/fetch.sha256", ort, sum)
	}
	return file{name: "usr/lib/stagecoach/libonnxruntime.so.1", kind: tar.TypeReg, mode: 0o755, data: b}, nil
}

// onnxVersion returns the version of ONNX Runtime that package.json pins.
func (s source) onnxVersion() (string, error) {
	b, err := os.ReadFile(filepath.Join(s.root, "package.json"))
	if err != nil {
		return "", err
	}
	var p struct{ Dependencies map[string]string }
	if err := json.Unmarshal(b, &p); err != nil {
		return "", fmt.Errorf("package.json: %w", err)
	}
	version := p.Dependencies["onnxruntime-node"]
	if version == "" {
		return "", errors.New("package.json has no dependency onnxruntime-node")
	}
	return version, nil
}

// initOnly makes the image stagecoach-init for an architecture.
func (s source) initOnly(ctx context.Context, arch, tmp string) (v variant, err error) {
	path := filepath.Join(tmp, "stagecoach-init-"+arch)
	if err := s.compile(ctx, "./cmd/stagecoach-init", arch, false, path); err != nil {
		return v, err
	}
	one, err := program("usr/bin/stagecoach-init", path)
	if err != nil {
		return v, err
	}
	v = variant{
		name: "stagecoach-init", arch: arch, description: descriptions["stagecoach-init"],
		config: v1.Config{Entrypoint: []string{"/usr/bin/stagecoach-init"}, WorkingDir: "/", User: fmt.Sprintf("%d:%d", user, user)},
		bill:   bill{name: "stagecoach-init"},
	}
	if err := v.bill.add(path); err != nil {
		return v, err
	}
	return v, v.add([]file{one, text("usr/share/doc/stagecoach/sbom.spdx.json", string(v.bill.json(s)))})
}

// add appends a layer per list of files.
func (v *variant) add(lists ...[]file) error {
	for _, files := range lists {
		l, err := layerOf(files)
		if err != nil {
			return err
		}
		v.layers = append(v.layers, l)
	}
	return nil
}

// labels returns the labels of OpenContainers.
func (s source) labels(name, description string) map[string]string {
	const prefix = "org.opencontainers.image."
	return map[string]string{
		prefix + "title": name, prefix + "description": description, prefix + "source": website, prefix + "url": website,
		prefix + "version": s.version, prefix + "revision": s.revision, prefix + "licenses": "MIT",
		prefix + "created": s.created.Format("2006-01-02T15:04:05Z"), prefix + "vendor": "The Stagecoach authors",
	}
}

// compose makes an image of a variant's layers. It has the time of the commit.
func (s source) compose(v variant) (v1.Image, error) {
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	for _, l := range v.layers {
		var err error
		add := mutate.Addendum{Layer: l, History: v1.History{Created: v1.Time{Time: s.created}, CreatedBy: "scripts/oci"}}
		if img, err = mutate.Append(img, add); err != nil {
			return nil, err
		}
	}
	file, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture, file.Created = "linux", v.arch, v1.Time{Time: s.created}
	file.Config = v.config
	file.Config.Labels = s.labels(v.name, v.description)
	return mutate.ConfigFile(img, file)
}

// writeLayout replaces the OCI layout in a folder.
func writeLayout(folder string, index v1.ImageIndex, tag string) error {
	if err := os.RemoveAll(folder); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(folder), 0o755); err != nil {
		return err
	}
	l, err := layout.Write(folder, empty.Index)
	if err != nil {
		return err
	}
	return l.AppendIndex(index, layout.WithAnnotations(map[string]string{refName: tag}))
}

func writeFile(name string, b []byte) error {
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	return os.WriteFile(name, b, 0o644)
}

// report prints the size of an image, compressed and unpacked.
func report(w io.Writer, v variant, img v1.Image) error {
	var packed, unpacked int64
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	for _, l := range layers {
		n, err := l.Size()
		if err != nil {
			return err
		}
		packed += n
		r, err := l.Uncompressed()
		if err != nil {
			return err
		}
		n, err = io.Copy(io.Discard, r)
		if err := errors.Join(err, r.Close()); err != nil {
			return err
		}
		unpacked += n
	}
	_, err = fmt.Fprintf(w, "%s for %s: %.1f MB compressed, %.1f MB unpacked, %d layers\n", v.name, v.arch, float64(packed)/1e6, float64(unpacked)/1e6, len(layers))
	return err
}
