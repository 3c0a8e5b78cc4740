package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/registry"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestDocs runs the examples of the documentation as a reader would. Each page has its own shell,
// beside a running `stagecoach up`, and its examples run in order. A block of shell code with "run"
// in its fence must succeed. If the next block has "output" in its fence, it is the expected
// output; … stands for any text. TestTutorial runs the tutorial, and TestHowtoCluster the page
// about several machines.
func TestDocs(t *testing.T) {
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(pages) == 0 {
		t.Fatalf("no pages: %v", err)
	}
	for _, page := range append(pages, "../../README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		if blocks := examples(t, string(text)); len(blocks) > 0 && !slices.Contains([]string{tutorial, clusterPage}, filepath.Base(page)) {
			t.Run(filepath.Base(page), func(t *testing.T) {
				t.Parallel() // pages wait a lot
				if bytes.Contains(text, []byte("import torch")) {
					proctest.Torch(t)
				}
				folder := t.TempDir()
				if filepath.Base(page) == "README.md" { // whose reader is in a clone
					folder = filepath.Dir(page)
				}
				if filepath.Base(page) == "howto-containerd.md" {
					s, flags := containerFlags(t)
					rd := read(t, folder, flags...)
					rd.here = append(rd.here, "/run/containerd/containerd.sock", s.Address, "-n stagecoach ", "-n "+s.Namespace+" ")
					rd.follow(blocks)
					return
				}
				read(t, folder).follow(blocks)
			})
		}
	}
}

// tutorial is the page that TestTutorial runs.
const tutorial = "tutorial.md"

// TestTutorial runs the tutorial as a new user does, with only what the tutorial asks for: a
// folder, the program, Go, a C compiler and a shell. Then it starts the tutorial again in the same
// folder, aborts it in the middle and kills `up`. The third run must succeed, too.
func TestTutorial(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/" + tutorial)
	if err != nil {
		t.Fatal(err)
	}
	page := examples(t, string(text))
	scaled := slices.IndexFunc(page, func(e example) bool { return strings.Contains(e.code, "stagecoach scale") })
	for _, word := range []string{"stagecoach new", "stagecoach build", "stagecoach deploy", "curl ", "ToUper", "stagecoach scale", "stagecoach remove -f"} {
		if !slices.ContainsFunc(page, func(e example) bool { return strings.Contains(e.code, word) }) {
			t.Fatalf("the tutorial runs no %q: this test proves little", word)
		}
	}
	folder := t.TempDir()
	state := filepath.Join(folder, ".stagecoach")
	r := start(t, "--state", state, "--images", filepath.Join(state, "images"))
	user := newReader(t, folder, folder, r)
	user.env = slices.DeleteFunc(user.env, func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return name == "PATH" || name == "REPO" || name == "GOFLAGS" || strings.HasPrefix(name, "STAGECOACH_") || strings.HasPrefix(name, "CGO_")
	})
	golang, err := exec.LookPath("go")
	if err != nil {
		t.Fatal(err)
	}
	user.env = append(user.env, "PATH="+filepath.Dir(user.bin)+":"+filepath.Dir(golang)+":/usr/bin:/bin")
	user.follow(page)
	if t.Failed() {
		return
	}
	user.follow(page[:scaled+1])
	r.kill()
	r.restart()
	user.follow(page)
}

// example is a block that is run and what it should print; empty: anything.
type example struct {
	line         int
	on           []string // machines, in this order; see TestHowtoCluster
	code, output string
}

var fence = regexp.MustCompile("^```([a-z]*) ?([a-z]*)(?: on=([a-z,]+))?$")

// examples returns the examples of a page.
func examples(t *testing.T, page string) []example {
	t.Helper()
	var all []example
	var block *[]string // that the present line belongs to
	var code, output, on []string
	inside := false
	for n, line := range strings.Split(page, "\n") {
		m := fence.FindStringSubmatch(line)
		switch {
		case m != nil && inside:
			inside = false
			switch block {
			case &code:
				all = append(all, example{line: n, on: on, code: strings.Join(code, "\n")})
			case &output:
				all[len(all)-1].output = strings.Join(output, "\n")
			}
			block = nil
		case m != nil:
			inside = true
			switch m[2] {
			case "run":
				code, block, on = nil, &code, strings.Split(m[3], ",")
			case "output":
				if len(all) == 0 {
					t.Fatalf("line %d: output without anything that was run before", n+1)
				}
				output, block = nil, &output
			}
		case block != nil:
			*block = append(*block, line)
		}
	}
	return all
}

// patience bounds the time of an example, or of what it has stopped, on a busy machine.
const patience = 10 * time.Minute

// read returns a reader in a folder, beside an up that has the repository's images and knows a
// registry.
func read(t *testing.T, folder string, flags ...string) *reader {
	home := folder
	if strings.HasPrefix(folder, "..") {
		home = t.TempDir()
	}
	// The reader's images, and links to the repository's.
	images := filepath.Join(home, ".stagecoach", "images")
	if err := os.MkdirAll(images, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(proctest.Built(t, "images", "stagecoach"), filepath.Join(images, "stagecoach")); err != nil {
		t.Fatal(err)
	}
	store := registryOf("reader", "s3cret")
	t.Cleanup(store.Close)
	r := start(t, append(flags, "--nats-listen", "127.0.0.1:0", "--images", images, "--registry-config", filepath.Join(home, ".docker", "config.json"))...)
	if err := os.Symlink(filepath.Join(r.state, "nats-token"), filepath.Join(home, ".stagecoach", "nats-token")); err != nil {
		t.Fatal(err)
	}
	joins := r.joinURL()
	t.Cleanup(func() { endBackground(t, folder) })
	rd := newReader(t, folder, home, r)
	registry := store.Listener.Addr().String()
	rd.here = []string{"nats://127.0.0.1:4222", joins, "127.0.0.1:5000", registry}
	rd.there = []string{registry, "127.0.0.1:5000"}
	return rd
}

// reader runs examples.
type reader struct {
	t      *testing.T
	r      *rig
	folder string
	bin    string   // the program, as its PATH has it
	env    []string // but for where up is
	// Pairs of texts in examples and their replacements, except the address of up.
	here, there []string
}

// newReader returns a reader in a folder, with a home that has the program.
func newReader(t *testing.T, folder, home string, r *rig) *reader {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	bin := filepath.Join(home, ".bin", "stagecoach")
	if err := os.MkdirAll(filepath.Dir(bin), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(bin, fmt.Appendf(nil, "#!/bin/sh\n%s=1 exec %q \"$@\"\n", actAsMain, self), 0o755); err != nil {
		t.Fatal(err)
	}
	// The caches of this user: the reader's home has none.
	caches, err := exec.Command("go", "env", "GOCACHE", "GOMODCACHE").Output()
	cache := strings.Fields(string(caches))
	if err != nil || len(cache) != 2 {
		t.Fatalf("go env: %q, %v", caches, err)
	}
	env := append(os.Environ(), "PATH="+filepath.Dir(bin)+":"+os.Getenv("PATH"), "HOME="+home,
		"REPO="+filepath.Dir(proctest.Built(t)), "GOCACHE="+cache[0], "GOMODCACHE="+cache[1])
	return &reader{t: t, r: r, folder: folder, bin: bin, env: env}
}

// follow runs a page's examples, in order.
func (rd *reader) follow(page []example) {
	t := rd.t
	t.Helper()
	here := strings.NewReplacer(append(rd.here, client.DefaultGateway, rd.r.Base)...)
	there := strings.NewReplacer(append(rd.there, rd.r.Base, client.DefaultGateway)...)
	for _, e := range page {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		cmd := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", here.Replace(e.code))
		cmd.Dir = rd.folder
		cmd.Env = append(slices.Clone(rd.env), "OPENFAAS_URL="+rd.r.Base)
		var stdout, stderr bytes.Buffer
		cmd.Stdout, cmd.Stderr = &stdout, &stderr
		err := cmd.Run()
		cancel()
		if err != nil {
			t.Fatalf("line %d: %v\n%s\nprinted:\n%s%s", e.line, err, e.code, stdout.String(), stderr.String())
		}
		if got := there.Replace(stdout.String()); !matches(e.output, got) {
			t.Errorf("line %d:\n%s\nprinted:\n%s\nwant:\n%s", e.line, e.code, got, e.output)
		}
	}
}

// endBackground checks that no background process of an example is left after some time. Each of
// them has written its pid into a file.
func endBackground(t *testing.T, folder string) {
	t.Helper()
	files, _ := filepath.Glob(filepath.Join(folder, "*.pid")) // the pattern is good
	for _, file := range files {
		b, err := os.ReadFile(file)
		pid, bad := strconv.Atoi(strings.TrimSpace(string(b)))
		if err := errors.Join(err, bad); err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		ours := func() bool {
			cwd, err := os.Readlink(filepath.Join("/proc", strconv.Itoa(pid), "cwd"))
			return err == nil && cwd == folder
		}
		defer func() {
			if ours() {
				_ = syscall.Kill(pid, syscall.SIGKILL) // it may end by itself just now
			}
		}()
		if !t.Failed() { // else the page was not followed to its end
			proctest.Until(t, file+"'s process to end", func() bool { return !ours() })
		}
	}
}

// registryOf is a registry that one user may use.
func registryOf(user, password string) *httptest.Server {
	all := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if u, p, _ := r.BasicAuth(); u != user || p != password {
			w.Header().Set("WWW-Authenticate", `Basic realm="registry"`)
			http.Error(w, "who are you?", http.StatusUnauthorized)
			return
		}
		all.ServeHTTP(w, r)
	}))
}

// matches reports whether text matches pattern, in which … stands for anything. The number of
// spaces does not count.
func matches(pattern, text string) bool {
	if pattern == "" {
		return true
	}
	quoted := regexp.QuoteMeta(strings.Join(strings.Fields(pattern), " "))
	// The dots may also stand for an empty text.
	quoted = strings.NewReplacer(" … ", "…", " …", "…", "… ", "…").Replace(quoted)
	return regexp.MustCompile("(?s)^" + strings.ReplaceAll(quoted, "…", ".*") + "$").MatchString(strings.Join(strings.Fields(text), " "))
}
