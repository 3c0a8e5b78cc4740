package main

import (
	"archive/tar"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// pushed pushes the layouts of a folder to a registry in this process, and returns what the
// registry has for an image.
func pushed(t *testing.T, folder, tag, image string) v1.ImageIndex {
	t.Helper()
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	t.Cleanup(server.Close)
	at := strings.TrimPrefix(server.URL, "http://") + "/team/path"
	if err := run(t.Context(), []string{"push", "--out", folder, "--tag", tag, at}, io.Discard); err != nil {
		t.Fatal(err)
	}
	ref, err := name.ParseReference(at + "/" + image + ":" + tag)
	if err != nil {
		t.Fatal(err)
	}
	index, err := remote.Index(ref, remote.WithContext(t.Context()))
	if err != nil {
		t.Fatal(err)
	}
	want, _, err := readLayout(filepath.Join(folder, image))
	if err != nil {
		t.Fatal(err)
	}
	a, errA := index.Digest()
	b, errB := want.Digest()
	if a != b || errors.Join(errA, errB) != nil {
		t.Errorf("%s: the registry has %s, the layout %s: %v", image, a, b, errors.Join(errA, errB))
	}
	return index
}

func TestPushSendsTheLayouts(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	for _, image := range names {
		index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
		for _, arch := range []string{"amd64", "arm64"} {
			v := variant{name: image, arch: arch, config: v1.Config{User: "65532"}}
			if err := v.add([]file{text("etc/name", image+arch)}); err != nil {
				t.Fatal(err)
			}
			img, err := testSource.compose(v)
			if err != nil {
				t.Fatal(err)
			}
			index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}})
		}
		if err := writeLayout(filepath.Join(folder, image), index, testSource.tag()); err != nil {
			t.Fatal(err)
		}
	}
	img := imageFor(t, pushed(t, folder, "t1", "stagecoach-init"), "arm64")
	c, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	const prefix = "org.opencontainers.image."
	for label, want := range map[string]string{"version": "v1.2.3", "revision": testSource.revision, "created": "2001-09-09T01:46:40Z", "licenses": "MIT", "source": website} {
		if got := c.Config.Labels[prefix+label]; got != want {
			t.Errorf("label %s is %q, want %q", label, got, want)
		}
	}
	if c.Architecture != "arm64" || c.OS != "linux" || c.Config.User != "65532" || !c.Created.Equal(testSource.created) {
		t.Errorf("configuration %+v", c)
	}
}

// imageFor returns the image of an index for an architecture.
func imageFor(t *testing.T, index v1.ImageIndex, arch string) v1.Image {
	t.Helper()
	m, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range m.Manifests {
		if d.Platform != nil && d.Platform.Architecture == arch {
			img, err := index.Image(d.Digest)
			if err != nil {
				t.Fatal(err)
			}
			return img
		}
	}
	t.Fatalf("the index has no image for %s", arch)
	return nil
}

// unpack writes the files of an image to a folder, with their modes and owners.
func unpack(t *testing.T, img v1.Image) (root string) {
	t.Helper()
	root = t.TempDir()
	if err := os.Chmod(root, 0o755); err != nil {
		t.Fatal(err)
	}
	r := mutate.Extract(img)
	defer r.Close()
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return root
		} else if err != nil {
			t.Fatal(err)
		}
		to := filepath.Join(root, filepath.Clean("/"+h.Name))
		switch h.Typeflag {
		case tar.TypeDir:
			err = os.MkdirAll(to, 0o755)
		case tar.TypeSymlink:
			err = os.Symlink(h.Linkname, to)
		default:
			var b []byte
			if b, err = io.ReadAll(tr); err == nil {
				err = os.WriteFile(to, b, 0o600)
			}
		}
		if err == nil {
			err = os.Lchown(to, h.Uid, h.Gid)
		}
		if err == nil && h.Typeflag != tar.TypeSymlink {
			err = syscall.Chmod(to, uint32(h.Mode))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// inside returns a command that runs as the image's user, with the image's files as a read-only
// root, and an empty folder at the paths to write to.
func inside(t *testing.T, root string, args ...string) *exec.Cmd {
	t.Helper()
	script := `set -e; mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"
for d in tmp var/lib/stagecoach; do mount -t tmpfs -o mode=1777 tmpfs "$1/$d"; done
mount -t tmpfs -o mode=755 tmpfs "$1/dev"; for d in null zero random urandom; do : > "$1/dev/$d"; mount --bind "/dev/$d" "$1/dev/$d"; done
if [ -d "$FUNCTIONS" ]; then mkdir -p "$1/var/lib/stagecoach/images/stagecoach"; cp -r "$FUNCTIONS" "$1/var/lib/stagecoach/images/stagecoach/"; chown -R 65532:65532 "$1/var/lib/stagecoach/images"; fi
mount -t proc proc "$1/proc"; root=$1; shift; exec chroot --userspec=65532:65532 "$root" "$@"`
	return exec.CommandContext(t.Context(), "unshare", append([]string{"--mount", "--pid", "--fork", "--kill-child", "sh", "-c", script, "sh", root}, args...)...)
}

// TestImagesRun pushes the images that STAGECOACH_OCI has, pulls stagecoach back, and runs it.
// make test-images-oci sets the variable.
func TestImagesRun(t *testing.T) {
	folder := os.Getenv("STAGECOACH_OCI")
	if folder == "" {
		t.Skip("make test-images-oci runs this test: it needs the images")
	}
	if os.Getuid() != 0 {
		t.Skip("needs root, to change the root")
	}
	root := unpack(t, imageFor(t, pushed(t, folder, "t1", "stagecoach"), "amd64"))
	_, tag, err := readLayout(filepath.Join(folder, "stagecoach"))
	if err != nil {
		t.Fatal(err)
	}
	out, err := inside(t, root, "/usr/bin/stagecoach", "version").CombinedOutput()
	if got := strings.ReplaceAll(strings.TrimSpace(string(out)), "+", "-"); err != nil || got != "stagecoach "+tag {
		t.Errorf("version: %q, %v; want that of the tag %s", out, err, tag)
	}
	for _, name := range []string{"etc/ssl/certs/ca-certificates.crt", "usr/share/zoneinfo/Europe/Berlin", "usr/share/doc/libc6/copyright"} {
		if info, err := os.Stat(filepath.Join(root, name)); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", name, err)
		}
	}
	b, err := os.ReadFile(filepath.Join(root, "usr/share/doc/stagecoach/sbom.spdx.json"))
	if err != nil {
		t.Fatal(err)
	}
	checkSPDX(t, b)
	checkLinks(t, root, "/usr/lib/stagecoach/libonnxruntime.so.1")
	checkLinks(t, root, "/usr/bin/stagecoach")
	checkUp(t, root)
}

// checkLinks checks that the dynamic linker finds all libraries of a file in the image.
func checkLinks(t *testing.T, root, path string) {
	t.Helper()
	out, err := inside(t, root, "/lib64/ld-linux-x86-64.so.2", "--list", path).CombinedOutput()
	if err != nil || strings.Contains(string(out), "not found") || !strings.Contains(string(out), "libc.so.6 => /lib/") {
		t.Errorf("libraries of %s: %v\n%s", path, err, out)
	}
}

// checkUp starts Stagecoach as the image's user. It deploys an HTTP function from a folder, which
// runs among the image's files, and calls it.
func checkUp(t *testing.T, root string) {
	t.Helper()
	addr := freeAddress(t)
	var output strings.Builder
	cmd := inside(t, root, "/usr/bin/stagecoach", "up", "--listen", addr, "--state", "/var/lib/stagecoach/state", "--images", "/var/lib/stagecoach/images")
	cmd.Stdout, cmd.Stderr = &output, &output
	cmd.Env = append(os.Environ(), "FUNCTIONS="+proctest.Built(t, "images", "stagecoach", "echo-http"))
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	defer func() { _ = cmd.Process.Kill() }() // which ends all processes of its namespace
	limit := time.After(time.Minute)
	await := func(want int, send func() (*http.Response, error)) (body string) {
		t.Helper()
		for {
			said := ""
			resp, err := send()
			if err == nil {
				b, _ := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if resp.StatusCode == want {
					return string(b)
				}
				said = resp.Status + ": " + string(b)
			}
			select {
			case err := <-ended:
				t.Fatalf("up has ended: %v\n%s", err, output.String())
			case <-limit:
				t.Fatalf("no answer with %d in time, but %v %s", want, err, said)
			case <-time.After(50 * time.Millisecond):
			}
		}
	}
	//nolint:noctx // the loop has a limit
	await(http.StatusOK, func() (*http.Response, error) { return http.Get("http://" + addr + "/healthz") })
	const function = `{"service":"echo","image":"stagecoach/echo-http:0.1.0","envProcess":"./echo-http","envVars":{"mode":"http"}}`
	await(http.StatusAccepted, func() (*http.Response, error) { //nolint:noctx // as above
		return http.Post("http://"+addr+"/system/functions", "application/json", strings.NewReader(function))
	})
	got := await(http.StatusOK, func() (*http.Response, error) { //nolint:noctx // as above
		return http.Post("http://"+addr+"/function/echo", "text/plain", strings.NewReader("hello"))
	})
	if !strings.HasPrefix(got, `{"body":"hello"`) {
		t.Errorf("the function answers %.100q, want the body", got)
	}
}

// freeAddress returns an address on which nothing listens.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}
