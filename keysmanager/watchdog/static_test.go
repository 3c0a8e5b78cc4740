package watchdog

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestStaticServesOnlyFilesOfItsFolder checks that files of the folder are served with HTTP's
// features for files, and that no other files are served.
func TestStaticServesOnlyFilesOfItsFolder(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	image := filepath.Join(dir, "image")
	for name, text := range map[string]string{
		"outside.txt": "the machine's", "image/inside.txt": "the image's", "image/home/app/public/index.html": "<h1>Hi</h1>",
		"image/home/app/public/css/a.css": "h1 {}", "image/www/index.html": "other",
	} {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	public := filepath.Join(image, "home/app/public")
	for link, to := range map[string]string{"machine": "../../../../outside.txt", "absolute": "/etc/passwd", "image": "../../../inside.txt"} {
		if err := os.Symlink(to, filepath.Join(public, link)); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(public, "pipe"), 0o644); err != nil {
		t.Fatal(err)
	}
	h, root, err := static(image, staticPath)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	for _, tc := range []struct {
		method, path, header string
		status               int
		kind, body           string
	}{
		{"GET", "/", "", 200, "text/html; charset=utf-8", "<h1>Hi</h1>"},
		{"GET", "/css/a.css", "", 200, "text/css; charset=utf-8", "h1 {}"},
		{"HEAD", "/css/a.css", "", 200, "text/css; charset=utf-8", ""},
		{"GET", "/css/a.css", "bytes=0-1", 206, "text/css; charset=utf-8", "h1"},
		{"GET", "/none", "", 404, "", ""},
		{"GET", "/../../inside.txt", "", 404, "", ""},
		{"GET", "/machine", "", 500, "", ""},
		{"GET", "/absolute", "", 500, "", ""},
		{"GET", "/image", "", 500, "", ""},
		{"GET", "/pipe", "", 404, "", ""},
	} {
		r := httptest.NewRequest(tc.method, "/", nil)
		r.URL.Path = tc.path
		if tc.header != "" {
			r.Header.Set("Range", tc.header)
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != tc.status || tc.kind != "" && (w.Header().Get("Content-Type") != tc.kind || w.Body.String() != tc.body) {
			t.Errorf("%s %s: %d %v %q, want %d %s %q", tc.method, tc.path, w.Code, w.Header(), w.Body, tc.status, tc.kind, tc.body)
		}
		for _, secret := range []string{"the machine's", "the image's", dir} {
			if strings.Contains(w.Body.String(), secret) {
				t.Errorf("%s: %q, which has %q", tc.path, w.Body, secret)
			}
		}
	}
	for _, folder := range []string{"/nosuch", "/inside.txt", "../.."} {
		if h, root, err := static(image, folder); err == nil {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/outside.txt", nil))
			if root.Close(); folder != "../.." || w.Code != http.StatusNotFound {
				t.Errorf("static_path=%s is served: %d %s", folder, w.Code, w.Body)
			}
		} else if strings.Contains(err.Error(), dir) {
			t.Errorf("static_path=%s: %v, want no path of the machine", folder, err)
		}
	}
}
