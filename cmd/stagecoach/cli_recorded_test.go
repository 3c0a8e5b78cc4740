package main

import (
	"bufio"
	"bytes"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

// TestRecordedCLI sends recorded requests of faas-cli, in order, with the images of these tests.
// Each request gets the recorded status.
func TestRecordedCLI(t *testing.T) {
	t.Parallel()
	auth := t.TempDir()
	for file, text := range map[string]string{"basic-auth-user": "admin", "basic-auth-password": "s3cret"} {
		if err := os.WriteFile(filepath.Join(auth, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	r := start(t, "--basic-auth-dir", auth)
	files, err := filepath.Glob("../../provider/testdata/cli/*.http")
	if err != nil || len(files) < 40 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files { // sorted by their numbers
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(b)))
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		body, err := io.ReadAll(req.Body)
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		text := strings.NewReplacer("example/shout:latest", "stagecoach/noop:0.1.0", "example/double:latest", "stagecoach/noop:0.1.0").Replace(string(body))
		var header []string
		for name, values := range req.Header {
			header = append(header, name, values[0])
		}
		want, err := strconv.Atoi(strings.Split(filepath.Base(file), ".")[1])
		if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if a := r.send(req.Method, req.URL.RequestURI(), text, header...); a.Status != want {
			t.Errorf("%s: %s %s: status %d, want %d: %s", filepath.Base(file), req.Method, req.URL, a.Status, want, a.Body)
		}
	}
}
