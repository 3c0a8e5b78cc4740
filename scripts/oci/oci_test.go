package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

var testSource = source{version: "v1.2.3", revision: strings.Repeat("ab", 20), created: time.Unix(1e9, 0).UTC()}

// TestSameProgramSameDigest builds and packs a small program in two folders. Their files have
// different times and modes.
func TestSameProgramSameDigest(t *testing.T) {
	t.Parallel()
	var digests []string
	for i, mode := range []os.FileMode{0o600, 0o664} {
		s := testSource
		s.root = filepath.Join(t.TempDir(), strings.Repeat("deep/", i)+"tree")
		for name, content := range map[string]string{
			"go.mod":  "module example.org/small\n\ngo 1.26\n",
			"main.go": "package main\n\nvar release string\n\nfunc main() { println(release); panic(release) }\n",
		} {
			path := filepath.Join(s.root, name)
			if err := writeFile(path, []byte(content)); err != nil {
				t.Fatal(err)
			}
			when := time.Unix(int64(i)*1e6, 0)
			if err := os.Chtimes(path, when, when); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(path, mode); err != nil {
				t.Fatal(err)
			}
		}
		to := filepath.Join(t.TempDir(), "small")
		if err := s.compile(t.Context(), ".", "amd64", false, to); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(to, mode|0o100); err != nil {
			t.Fatal(err)
		}
		f, err := program("usr/bin/small", to)
		if err != nil {
			t.Fatal(err)
		}
		v := variant{name: "small", arch: "amd64"}
		if err := v.add([]file{f, text("etc/x", "x")}); err != nil {
			t.Fatal(err)
		}
		img, err := s.compose(v)
		if err != nil {
			t.Fatal(err)
		}
		digest, err := img.Digest()
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, digest.String())
		if i == 0 {
			out, err := exec.CommandContext(t.Context(), to).CombinedOutput()
			if err == nil || !strings.HasPrefix(string(out), "v1.2.3\n") {
				t.Errorf("the program prints %q, want its release v1.2.3", out)
			}
		}
	}
	if digests[0] != digests[1] {
		t.Errorf("digests %s and %s, want the same", digests[0], digests[1])
	}
}

func TestLayerSortsFilesAndAddsFolders(t *testing.T) {
	t.Parallel()
	l, err := layerOf([]file{text("b/c/d", "1"), folder("tmp", 0o1777, 7), text("a", "old"), text("a", "new")})
	if err != nil {
		t.Fatal(err)
	}
	r, err := l.Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var got []string
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(tr)
		got = append(got, h.Name+" "+string(b))
		if h.ModTime.Unix() != 0 || h.Name == "tmp/" && (h.Mode != 0o1777 || h.Uid != 7) {
			t.Errorf("%s: time %v, mode %o, user %d", h.Name, h.ModTime, h.Mode, h.Uid)
		}
	}
	if want := []string{"a new", "b/ ", "b/c/ ", "b/c/d 1", "tmp/ "}; !slices.Equal(got, want) {
		t.Errorf("files %q, want %q", got, want)
	}
}

// makeDeb makes a Debian package, and returns its lock and its file in a cache.
func makeDeb(t *testing.T, cache string) deb {
	t.Helper()
	if _, err := exec.LookPath("dpkg-deb"); err != nil {
		t.Skip("dpkg-deb is missing: this machine is not Debian")
	}
	root := filepath.Join(t.TempDir(), "small")
	for name, content := range map[string]string{
		"DEBIAN/control": "Package: small\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n",
		"usr/share/ca-certificates/mozilla/B.crt": "second",
		"usr/share/ca-certificates/mozilla/A.crt": "first\n",
		"usr/bin/tool":                         "a program",
		"usr/lib/x86_64-linux-gnu/libx.so.1.2": "a library",
		"usr/share/doc/small/copyright":        "rights",
		"usr/share/doc/small/changelog":        "changes",
	} {
		if err := writeFile(filepath.Join(root, name), []byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("libx.so.1.2", filepath.Join(root, "usr/lib/x86_64-linux-gnu/libx.so.1")); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(root, "usr/share/zoneinfo/Etc"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(root, "usr/share/zoneinfo/Etc/UTC"), []byte("zone"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Link(filepath.Join(root, "usr/share/zoneinfo/Etc/UTC"), filepath.Join(root, "usr/share/zoneinfo/UTC")); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), "dpkg-deb", "--root-owner-group", "--build", root).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	b, err := os.ReadFile(root + ".deb")
	if err != nil {
		t.Fatal(err)
	}
	sum := sha256.Sum256(b)
	d := deb{"small", "1", "all", hex.EncodeToString(sum[:])}
	if err := writeFile(filepath.Join(cache, d.sha256+".deb"), b); err != nil {
		t.Fatal(err)
	}
	return d
}

func TestDebianFilesKeepLibrariesAndCertificates(t *testing.T) {
	t.Parallel()
	cache := t.TempDir()
	d := makeDeb(t, cache)
	files, err := debianFiles(t.Context(), []deb{d}, cache)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]file{}
	for _, f := range files {
		got[f.name] = f
	}
	if b := string(got["etc/ssl/certs/ca-certificates.crt"].data); b != "first\nsecond\n" {
		t.Errorf("bundle %q, want both certificates, sorted by name", b)
	}
	if f := got["usr/lib/x86_64-linux-gnu/libx.so.1"]; f.link != "libx.so.1.2" {
		t.Errorf("link of the library: %+v", f)
	}
	// One of the two names of the zone is a hard link to the other.
	a, b := got["usr/share/zoneinfo/UTC"], got["usr/share/zoneinfo/Etc/UTC"]
	if string(a.data)+string(b.data) != "zone" || a.link+b.link != "Etc/UTC" && a.link+b.link != "../UTC" {
		t.Errorf("zones %+v and %+v, want a file and a relative link to it", a, b)
	}
	if !strings.Contains(string(got["var/lib/dpkg/status.d/small"].data), "Version: 1\n") {
		t.Error("scanners do not find the package")
	}
	if len(got["usr/share/doc/small/copyright"].data) == 0 {
		t.Error("the copyright is missing")
	}
	for _, name := range []string{"usr/bin/tool", "usr/share/doc/small/changelog", "usr/share/ca-certificates/mozilla/A.crt"} {
		if _, ok := got[name]; ok {
			t.Errorf("%s is in the image, want it left out", name)
		}
	}
}

func TestDebianPackagesMustMatchTheLock(t *testing.T) {
	t.Parallel()
	cache := t.TempDir()
	d := makeDeb(t, cache)
	wrong := d
	wrong.sha256 = strings.Repeat("0", 64)
	if err := wrong.check(filepath.Join(cache, d.sha256+".deb")); err == nil {
		t.Error("a file with another hash is accepted")
	}
	if err := d.check(filepath.Join(cache, d.sha256+".deb")); err != nil {
		t.Error(err)
	}
	debs, err := readLock("debian.lock")
	if err != nil {
		t.Fatal(err)
	}
	var locked []string
	for _, d := range debs {
		locked = append(locked, d.name)
	}
	if !slices.Equal(locked, debianPackages) {
		t.Errorf("debian.lock has %v, want %v", locked, debianPackages)
	}
}

func TestCompareVersionsOfLibc(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		a, b string
		want int
	}{{"2.34", "2.36-9+deb12u14", -1}, {"2.36", "2.36-9+deb12u14", 0}, {"2.38", "2.36-9+deb12u14", 1}, {"2.2.5", "2.36-9", -1}, {"3.1", "2.36-9", 1}} {
		if got := compareVersions(c.a, c.b); got != c.want {
			t.Errorf("compareVersions(%s, %s) = %d, want %d", c.a, c.b, got, c.want)
		}
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := checkLibc(self, []deb{{name: "libc6", version: "2.1-1"}}); err == nil {
		t.Error("a program that needs a later glibc is accepted") // tests with -race use cgo
	}
}

// TestBillIsSPDX checks a bill against the rules of SPDX 2.3.
func TestBillIsSPDX(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b := bill{name: "small", debs: []deb{{"libstdc++6", "12.2.0-14+deb12u1", "amd64", strings.Repeat("ab", 32)}}}
	if err := b.add(self, self); err != nil {
		t.Fatal(err)
	}
	b.onnx("1.2.3", []byte("library"))
	doc := b.json(testSource)
	checkSPDX(t, doc)
	for _, want := range []string{"pkg:golang/github.com/google/go-containerregistry@v", "pkg:golang/stdlib@", "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=amd64", "pkg:npm/onnxruntime-node@1.2.3"} {
		if n := bytes.Count(doc, []byte(want)); n != 1 {
			t.Errorf("%d packages %s, want 1", n, want)
		}
	}
	if !bytes.Equal(doc, b.json(testSource)) {
		t.Error("two bills of one image differ")
	}
}

var (
	spdxID  = regexp.MustCompile(`^SPDXRef-[a-zA-Z0-9.-]+$`)
	purlOK  = regexp.MustCompile(`^pkg:(golang|deb|npm)/[^ +]+$`)
	spaceOK = regexp.MustCompile(`^https://[^#]+$`)
)

// checkSPDX checks the fields that SPDX 2.3 requires, their forms, and that all names lead to
// something.
func checkSPDX(t *testing.T, b []byte) {
	t.Helper()
	var doc spdxDocument
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	if err := d.Decode(&doc); err != nil {
		t.Fatal(err)
	}
	if doc.SPDXVersion != "SPDX-2.3" || doc.DataLicense != "CC0-1.0" || doc.SPDXID != "SPDXRef-DOCUMENT" || doc.Name == "" || !spaceOK.MatchString(doc.DocumentNamespace) {
		t.Errorf("head of the document: %q %q %q %q %q", doc.SPDXVersion, doc.DataLicense, doc.SPDXID, doc.Name, doc.DocumentNamespace)
	}
	if _, err := time.Parse("2006-01-02T15:04:05Z", doc.CreationInfo.Created); err != nil || len(doc.CreationInfo.Creators) == 0 {
		t.Errorf("creation: %+v: %v", doc.CreationInfo, err)
	}
	for _, c := range doc.CreationInfo.Creators {
		if kind, _, _ := strings.Cut(c, ": "); !slices.Contains([]string{"Tool", "Organization", "Person"}, kind) {
			t.Errorf("creator %q", c)
		}
	}
	ids := map[string]bool{doc.SPDXID: true}
	for _, p := range doc.Packages {
		if !spdxID.MatchString(p.SPDXID) || ids[p.SPDXID] || p.Name == "" || p.DownloadLocation == "" || p.LicenseDeclared == "" || p.FilesAnalyzed {
			t.Errorf("package %+v", p)
		}
		ids[p.SPDXID] = true
		for _, c := range p.Checksums {
			if c.Algorithm != "SHA256" || len(c.Value) != 64 {
				t.Errorf("%s: checksum %+v", p.Name, c)
			}
		}
		for _, r := range p.ExternalRefs {
			if r.Category != "PACKAGE-MANAGER" || r.Type != "purl" || !purlOK.MatchString(r.Locator) {
				t.Errorf("%s: reference %+v", p.Name, r)
			}
		}
	}
	described, contained := 0, 0
	for _, r := range doc.Relationships {
		if !ids[r.Element] || !ids[r.Related] {
			t.Errorf("relationship %+v names what is not there", r)
		}
		described += map[string]int{"DESCRIBES": 1}[r.Type]
		contained += map[string]int{"CONTAINS": 1}[r.Type]
	}
	if described != 1 || contained != len(doc.Packages)-1 {
		t.Errorf("%d packages, %d described, %d contained; want 1 described, and the rest in it", len(doc.Packages), described, contained)
	}
}
