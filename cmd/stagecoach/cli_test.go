package main

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// operator runs the program as a user does, in a folder and with a home of its own.
type operator struct {
	t       *testing.T
	dir     string
	gateway string
}

func (c *operator) try(in string, args ...string) (string, error) {
	exe, err := os.Executable()
	if err != nil {
		c.t.Fatal(err)
	}
	cmd := exec.CommandContext(c.t.Context(), exe, args...)
	cmd.Dir, cmd.Stdin = c.dir, strings.NewReader(in)
	cmd.Env = append(os.Environ(), actAsMain+"=1", "OPENFAAS_URL="+c.gateway, "OPENFAAS_CONFIG="+c.dir)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	err = cmd.Run()
	return out.String(), err
}

// run runs a command that must succeed and print what matches want.
func (c *operator) run(want, in string, args ...string) string {
	c.t.Helper()
	out, err := c.try(in, args...)
	if err != nil || !regexp.MustCompile(want).MatchString(out) {
		c.t.Fatalf("stagecoach %q: %v, printed %q, want %q", args, err, out, want)
	}
	return out
}

// refuse runs a command that must fail and print what matches want.
func (c *operator) refuse(want, in string, args ...string) {
	c.t.Helper()
	if out, err := c.try(in, args...); err == nil || !regexp.MustCompile(want).MatchString(out) {
		c.t.Errorf("stagecoach %q: %v, printed %q, want an error with %q", args, err, out, want)
	}
}

// handler makes the folder that `faas-cli new` makes.
func (c *operator) handler(name, lang string) {
	c.t.Helper()
	f, err := fs.Sub(stagecoach.Templates(), lang+"/function")
	if err != nil {
		c.t.Fatal(err)
	}
	if err := os.CopyFS(filepath.Join(c.dir, name), f); err != nil {
		c.t.Fatal(err)
	}
}

func (c *operator) write(file, text string) {
	c.t.Helper()
	if err := os.WriteFile(filepath.Join(c.dir, file), []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
}

// goBlock returns the Go program of a template's README.
func goBlock(t *testing.T, lang string) string {
	t.Helper()
	b, err := fs.ReadFile(stagecoach.Templates(), lang+"/README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range strings.Split(string(b), "```go\n")[1:] {
		if code, _, _ := strings.Cut(part, "```"); strings.Contains(code, "package function") {
			return code
		}
	}
	t.Fatalf("README of %s has no program", lang)
	return ""
}

const cliStack = `version: 1.0
provider: {name: openfaas, gateway: "http://127.0.0.1:8080"}
functions:
  shout: {lang: go-stage, handler: ./shout, image: "example/shout:latest"}
  double: {lang: onnx-stage, handler: ./double, image: "example/double:latest", labels: {com.openfaas.scale.min: "0", com.openfaas.scale.zero: "true"}}
  lines: {lang: onnx-stage, handler: ./lines, image: "example/lines:latest"}
`

// TestTemplates acts as a user without Docker and faas-cli. Each template is built, deployed,
// called, described and removed. The third function is the program that the README of onnx-stage
// shows.
func TestTemplates(t *testing.T) {
	t.Parallel()
	auth := t.TempDir()
	for file, text := range map[string]string{"basic-auth-user": "admin", "basic-auth-password": "s3cret"} {
		if err := os.WriteFile(filepath.Join(auth, file), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	images := t.TempDir()
	r := start(t, "--images", images, "--basic-auth-dir", auth)
	c := &operator{t, t.TempDir(), r.Base}
	c.handler("shout", "go-stage")
	c.handler("double", "onnx-stage")
	c.handler("lines", "onnx-stage")
	c.write("lines/handler.go", goBlock(t, "onnx-stage"))
	c.write("stack.yaml", cliStack)
	c.refuse("functions that are deployed.*401", "", "deploy", "--filter", "shout")
	// As faas-cli login writes it.
	c.write("config.yml", "auths:\n- gateway: "+r.Base+"\n  auth: basic\n  token: YWRtaW46czNjcmV0\n")

	c.refuse(`image "example/shout:latest"`, "", "deploy", "--filter", "shout") // not built yet
	c.run(`double +example/double:latest +2\.\d MiB +sha256:[0-9a-f]{12}`, "", "build", "--images", images)
	c.throughAFile(images)
	c.run(`double: created, http://127.*/function/double\n(?s:.*)shout: ready with 1 replicas`, "", "deploy", "--wait")
	c.run("shout: updated", "", "deploy", "--filter", "shout", "-f", "stack.yaml")

	c.run("^You said: hello\n$", "hello", "invoke", "shout", "--query", "a=b", "--header", "X-A: b", "-m", "PUT")
	tensors := `{"inputs":[{"name":"x","datatype":"FP32","shape":[3],"data":[1,2,3]}]}`
	out := c.run(`\[3,5,7\]`, tensors, "invoke", "double", "--header", "Content-Type=application/json")
	if !json.Valid([]byte(out)) {
		t.Errorf("double answers %q, want JSON", out)
	}
	c.run(`\[3 5 7\]`, "1 2 3", "invoke", "lines")
	c.refuse(`invoke lines: status 400: .*"two", want a number`, "1 two", "invoke", "lines")
	c.refuse(`invoke none: status 404: .*none`, "", "invoke", "none")
	id := strings.TrimSpace(c.run(`^[0-9a-zA-Z-]{8,}\n$`, "hello", "invoke", "shout", "--async"))
	c.run("^You said: hello\n$", "", "call", id, "--wait", "--body")
	r.must(http.StatusUnauthorized, http.MethodGet, "/system/async/"+id, "")

	c.run(`FUNCTION +IMAGE +INVOCATIONS +REPLICAS +STATUS\n(?s:.*)shout +example/shout:latest +\d+ +1/1 +ready\n`, "", "list")
	var all []client.FunctionStatus
	if err := json.Unmarshal([]byte(c.run("", "", "list", "--json")), &all); err != nil || len(all) != 3 || all[0].Name != "double" {
		t.Errorf("list --json: %v, %+v, want three functions in order", err, all)
	}
	c.run(`Name: +shout\nNamespace: +openfaas-fn\nImage: +example/shout:latest\nReplicas: +1, 1 ready\n`, "", "describe", "shout")
	c.run("shout: 2 replicas wanted", "", "scale", "shout", "2")
	c.refuse("scale none: status 404", "", "scale", "none", "1")

	c.run("key: created", "hush", "secret", "create", "key")
	c.refuse("secret create key: status 409", "hush", "secret", "create", "key")
	c.run("key: updated", "", "secret", "update", "key", "--from-literal", "hush2")
	c.run("^key\n$", "", "secret", "list")
	c.run("key: removed", "", "secret", "remove", "key")
	c.run("^$", "", "secret", "list")
	c.run("team: created", "", "namespace", "create", "team")
	c.refuse("namespace create team: status 409", "", "namespace", "create", "team")
	c.run("^openfaas-fn\nteam\n$", "", "namespace", "list")
	c.run("team: removed", "", "namespace", "remove", "team")
	c.run("^openfaas-fn\n$", "", "namespace", "list")

	c.run("double: removed\nlines: removed\n", "", "remove", "double", "lines")
	c.refuse("remove double: status 404", "", "remove", "double")
	c.run("shout: removed", "", "remove", "-f", "stack.yaml", "--filter", "shout")
	// A second attempt.
	c.run("^double: is not deployed\nlines: is not deployed\nshout: is not deployed\n$", "", "remove")
}

// TestCLILogs reads what a function's replicas print.
func TestCLILogs(t *testing.T) {
	t.Parallel()
	r := start(t)
	c := &operator{t, t.TempDir(), r.Base}
	r.deployAll(fn{"fails", "wait", nil, nil, map[string]string{"wait_mean": "never"}})
	proctest.Until(t, "a line of the function that cannot start", func() bool {
		out, err := c.try("", "logs", "fails", "--tail", "1", "--since", "1h")
		return err == nil && strings.Contains(out, `wait_mean="never", want a duration`)
	})
	c.run(`"text":".*wait_mean`, "", "logs", "fails", "--json")
	c.refuse("logs none: status 404", "", "logs", "none")
	r.must(http.StatusOK, http.MethodGet, "/healthz", "")
}

// TestBuildsThisRepository builds functions of the repository's stack, whose handlers are packages
// of its own module.
func TestBuildsThisRepository(t *testing.T) {
	t.Parallel()
	proctest.Built(t, "models") // links in the handlers lead there
	images := t.TempDir()
	c := &operator{t: t, dir: "../.."}
	c.run(`ocr-text +stagecoach/ocr-text:0\.1\.0`, "", "build", "--images", images, "--folder", "--filter", "ocr-*")
	for _, file := range []string{"ocr-detect/0.1.0/stage", "ocr-detect/0.1.0/model/det.onnx", "ocr-recognise/0.1.0/model/keys.txt", "ocr-text/0.1.0/stage"} {
		if info, err := os.Stat(filepath.Join(images, "stagecoach", file)); err != nil || info.Size() == 0 {
			t.Errorf("%s: %v", file, err)
		}
	}
}

func TestCommandsRefuse(t *testing.T) {
	c := &operator{t, t.TempDir(), "http://127.0.0.1:1"}
	c.write("stack.yml", "version: 1.0\nprovider: {name: openfaas}\nfunctions:\n  a: {lang: dockerfile, handler: ., image: a}\n")
	for want, args := range map[string][]string{
		"stack file: open none.yml":                 {"deploy", "-f", "none.yml"},
		`--filter "b" matches none of: a`:           {"build", "--filter", "b"},
		`functions.a: lang: "dockerfile" is built`:  {"build"},
		`got argument "a", want flags alone`:        {"build", "a"},
		"deploy: got argument":                      {"deploy", "a"},
		`list: got argument "a"`:                    {"list", "a"},
		"describe: got .*, want one name":           {"describe"},
		"invoke: --header .*, want NAME=VALUE":      {"invoke", "a", "--header", "x"},
		"scale: .*, want NAME REPLICAS":             {"scale", "a"},
		`scale: "x", want a number`:                 {"scale", "a", "x"},
		"secret: got .*, want create NAME":          {"secret"},
		"namespace: got .*, want list":              {"namespace", "x"},
		"want one: an archive":                      {"build", "--folder", "--out", "x"},
		"connection refused":                        {"list"},
		"want one of the two":                       {"remove", "a", "-f", "stack.yml"},
		"secret create: got --from-literal and":     {"secret", "create", "a", "--from-literal", "x", "--from-file", "y"},
		`secret list: got argument "x"`:             {"secret", "list", "x"},
		`stagecoach: pipeline describe: got .*want`: {"pipeline", "describe"},
	} {
		c.refuse(want, "", args...)
	}
}
