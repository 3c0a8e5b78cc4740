package main

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// TestGuessedProcesses deploys functions without fprocess from image folders: a script, a Python
// program and a server. Each function runs, and deploy and describe print the guessed process. A
// folder with several programs is refused until the function sets fprocess. The images are named
// with docker.io, which must make no difference.
func TestGuessedProcesses(t *testing.T) {
	t.Parallel()
	proctest.Python(t)
	images := t.TempDir()
	r := start(t, "--images", images)
	c := &operator{t, t.TempDir(), r.Base}
	put := func(image, file, text string, mode os.FileMode) {
		t.Helper()
		folder := filepath.Join(images, "example", image, "1")
		if err := os.MkdirAll(folder, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(folder, file), []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	put("script", "lines.sh", "#!/bin/sh\necho \"script: $(cat)\"\n", 0o755)
	put("script", "notes.txt", "not to be run", 0o644)
	put("python", "index.py", "import sys\nfrom util import said\nprint(said(sys.stdin.read()))\n", 0o644)
	put("python", "util.py", "def said(text):\n    return 'python: ' + text\n", 0o644)
	put("server", "server.py", `
import http.server, os

class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.close_connection = True
        body = b"server: hello"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

http.server.HTTPServer(("127.0.0.1", int(os.environ["port"])), Answer).serve_forever()
`, 0o644)
	put("several", "a.sh", "#!/bin/sh\necho a\n", 0o755)
	put("several", "b.sh", "#!/bin/sh\necho b\n", 0o755)
	stack := "version: 1.0\nprovider: {name: openfaas}\nfunctions:\n"
	for _, name := range []string{"script", "python", "server", "several"} {
		stack += "  " + name + `: {image: "docker.io/example/` + name + `:1"}` + "\n"
	}
	c.write("stack.yml", stack)
	for name, guess := range map[string]string{
		"script": `\./lines\.sh, because nothing else in its image's folder can be run; runs once per request`,
		"python": `python3 index\.py, because .*; runs once per request`,
		"server": `python3 server\.py, because .*; runs as a server`,
	} {
		c.run(name+`: created, .*\n`+name+`: guessed fprocess: `+guess, "", "deploy", "--filter", name)
		c.run(`^`+name+`: hello\n?$`, "hello", "invoke", name)
		c.run(`Process: +guessed fprocess: `+guess, "", "describe", name)
	}
	c.refuse(`envProcess: got none, and image "docker.io/example/several:1": its folder has several programs: \./a\.sh, \./b\.sh, want the command to run, as fprocess in the stack file`,
		"", "deploy", "--filter", "several")
	r.must(http.StatusNotFound, http.MethodGet, "/system/function/several", "")
	c.write("stack.yml", strings.Replace(stack, `several:1"`, `several:1", fprocess: ./b.sh`, 1))
	c.run(`^several: created, [^\n]*\n$`, "", "deploy", "--filter", "several")
	c.run("^b\n$", "", "invoke", "several")
	c.run(`Process: +\./b\.sh\n`, "", "describe", "several")

	r.kill()
	r.restart()
	c.gateway = r.Base
	c.run(`^server: hello$`, "", "invoke", "server") // what was guessed is stored
}
