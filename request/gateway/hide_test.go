package gateway

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestHidePaths checks that paths of the operator's folders become names, and that paths of an
// image's files become the paths that the function sees.
func TestHidePaths(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	if err := os.Mkdir(filepath.Join(dir, "state"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(dir, "state"), link); err != nil {
		t.Fatal(err)
	}
	hide := HidePaths(link, dir+"/images", dir+"/state/rendezvous")
	for text, want := range map[string]string{
		"no path": "no path",
		"open " + dir + "/images/.oci/roots/0123abcd/fs/bin/x: no such file": "open /bin/x: no such file",
		"exec " + dir + "/images/stagecoach/echo/0.1.0/echo: denied":         "exec IMAGES/stagecoach/echo/0.1.0/echo: denied",
		"dial unix " + dir + "/state/rendezvous/5: refused":                  "dial unix RENDEZVOUS/5: refused",
		"open " + dir + "/state/blobs/1 and " + link + "/blobs/2":            "open STATE/blobs/1 and STATE/blobs/2",
		"open /etc/passwd": "open /etc/passwd",
	} {
		if got := hide(text); got != want || strings.Contains(got, dir) {
			t.Errorf("%q becomes %q, want %q", text, got, want)
		}
	}
}
