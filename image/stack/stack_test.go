package stack

import (
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

const head = "version: 1.0\nprovider: {name: openfaas, gateway: http://127.0.0.1:8080}\n"

func lookup(name string) (string, bool) {
	v, ok := map[string]string{"TAG": "2.0", "EMPTY": "", "DOLLAR": "${TAG}"}[name]
	return v, ok
}

// full is a file with every field, spelled as in faas-cli's documentation.
const full = head + `
x-shared:
  labels: &labels {com.openfaas.scale.min: "0", tier: gold}
functions:
  a:
    lang: go-stage
    handler: ./a
    image: ${REGISTRY:-example}/a:${TAG}
    fprocess: ./stage -v
    environment: {max_inflight: 4, debug: true}
    environment_file: [one.yml]
    secrets: [key]
    constraints: ["zone == a"]
    labels:
      <<: *labels
      tier: silver
    annotations: {stagecoach.dev/pipeline: p}
    limits: {memory: 128Mi, cpu: 500m}
    requests: {memory: 64Mi}
    readonly_root_filesystem: true
    namespace: team
    skip_build: true
    build_args: {A: b}
    build_options: [dev]
    build_secrets: {s: ./s}
    platforms: linux/amd64
  b: {labels: *labels}
configuration:
  templates: [{name: go-stage, source: https://example.com/templates}]
  copy: [common]
`

func TestParse(t *testing.T) {
	got, err := Parse("stack.yml", []byte(full), lookup)
	if err != nil {
		t.Fatal(err)
	}
	want := &File{
		Name: "stack.yml", Version: "1.0", Provider: Provider{Name: "openfaas", Gateway: "http://127.0.0.1:8080"},
		Functions: map[string]Function{
			"a": {
				Lang: "go-stage", Handler: "./a", Image: "example/a:2.0", FProcess: "./stage -v",
				Environment: map[string]string{"max_inflight": "4", "debug": "true"}, EnvironmentFile: []string{"one.yml"},
				Secrets: []string{"key"}, Constraints: []string{"zone == a"}, Labels: map[string]string{"com.openfaas.scale.min": "0", "tier": "silver"},
				Annotations: map[string]string{"stagecoach.dev/pipeline": "p"}, Limits: &Resources{"128Mi", "500m"}, Requests: &Resources{Memory: "64Mi"},
				ReadOnlyRootFilesystem: true, Namespace: "team", SkipBuild: true, BuildArgs: map[string]string{"A": "b"},
				BuildOptions: []string{"dev"}, BuildSecrets: map[string]string{"s": "./s"}, Platforms: "linux/amd64",
			},
			"b": {Labels: map[string]string{"com.openfaas.scale.min": "0", "tier": "gold"}},
		},
		Configuration: Configuration{Templates: []Template{{"go-stage", "https://example.com/templates"}}, Copy: []string{"common"}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

func TestParseRefuses(t *testing.T) {
	for name, tc := range map[string]struct{ text, want string }{
		"nothing":             {"", "stack.yml: empty"},
		"no YAML":             {head + "functions: [", "stack.yml:3: "},
		"unknown field":       {head + "functions:\n  a:\n    handlr: x", "stack.yml:5: functions.a.handlr: unknown field, want one of annotations, build_args"},
		"unknown at the top":  {head + "function: {}", "stack.yml:3: function: unknown field, want one of configuration, functions"},
		"unknown in limits":   {head + "functions:\n  a:\n    limits: {gpu: 1}", "stack.yml:5: functions.a.limits.gpu: unknown field, want one of cpu, memory"},
		"unknown by an alias": {head + "x-a: &a {lng: x}\nfunctions:\n  a: *a", "stack.yml:3: functions.a.lng: unknown"},
		"unknown by a merge":  {head + "x-a: &a {lng: x}\nfunctions:\n  a:\n    <<: [*a]", "stack.yml:3: functions.a.lng: unknown"},
		"unknown in a list":   {head + "configuration:\n  templates:\n  - nam: x", "stack.yml:5: configuration.templates[0].nam: unknown field, want one of name, source"},
		"a list for a map":    {head + "functions:\n  a:\n    labels: [x]", "stack.yml:5: cannot unmarshal"},
		"twice":               {head + "functions:\n  a: {}\n  a: {}", "stack.yml:5: mapping key"},
		"an alias of itself":  {head + "functions: {a: {labels: &l {b: *l}}}", "stack.yml:3: cannot unmarshal"},
		"a name with a path":  {head + "functions: {../a: {}}", `stack.yml: functions: "../a", want a name of letters, digits`},
		"a folder's name":     {head + "functions: {..: {}}", `stack.yml: functions: "..", want a name`},
		"no name of a key":    {head + "functions: {'': {}}", `stack.yml: functions: "", want a name`},
		"an umlaut":           {head + "functions: {grün: {}}", `stack.yml: functions: "grün", want a name`},
		"many by aliases": {
			head + "functions:\n  a: {constraints: &a [" + strings.Repeat("x,", 300_000) + "]}\n  b: {constraints: *a}\n  c: {constraints: *a}\n  d: {constraints: *a}",
			"stack.yml: aliases expand to more than 1048576 values",
		},
		"provider":          {"provider: {name: faas}", `stack.yml: provider.name: "faas", want openfaas`},
		"version":           {"version: 2\nprovider: {name: openfaas}", `stack.yml: version: "2", want 1.0`},
		"open variable":     {head + "functions: # ${TAG", "stack.yml:3: unknown operation on TAG"},
		"open default":      {head + "functions: # ${TAG:-x", `stack.yml:3: no } after ${`},
		"no name":           {head + "functions: ${1}", `stack.yml:3: no name after ${ in "${1}", want ${NAME}`},
		"unknown operation": {head + "functions: ${TAG^^}", "stack.yml:3: unknown operation on TAG"},
		"deep":              {strings.Repeat("${A:-", 9), "stack.yml:1: more than 8 defaults within each other"},
		"large":             {strings.Repeat("#", MaxSize+1), "stack.yml: 4194305 bytes, want at most"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse("stack.yml", []byte(tc.text), lookup)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestSubstitute(t *testing.T) {
	for text, want := range map[string]string{
		"a$b $":                      "a$b $",
		"${TAG}-${TAG}":              "2.0-2.0",
		"${NONE}|${EMPTY}":           "|",
		"${NONE:-x}${EMPTY:=y}":      "xy",
		"${TAG=1}${NONE=}":           "2.0",
		"${NONE:-a ${TAG} {b}":       "a 2.0 {b",
		"${NONE:-${EMPTY:-in}} out}": "in out}",
		"$${TAG} $$$$ $$":            "${TAG} $$ $",
		"${DOLLAR}":                  "${TAG}", // values are not substituted again
	} {
		if got, err := substitute("f", text, lookup); err != nil || got != want {
			t.Errorf("%q: %q, %v, want %q", text, got, err, want)
		}
	}
}

func TestRead(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"stack.yml": head + "functions:\n  a:\n    environment: {A: stack, B: stack, C: stack}\n    environment_file: [one.yml, two.yml]\n  b: {}\n",
		"one.yml":   "environment: {B: one, C: one}",
		"two.yml":   "environment: {C: 2}",
		"bad.yml":   head + "functions: {a: {environment_file: [three.yml]}}",
		"three.yml": "environment: {}\nenv: {}",
		"gone.yml":  head + "functions: {a: {environment_file: [four.yml]}}",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
	f, err := Read("stack.yml")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := f.Functions["a"].Environment, map[string]string{"A": "stack", "B": "one", "C": "2"}; !maps.Equal(got, want) {
		t.Errorf("environment %v, want %v", got, want)
	}
	if f.Path("a/b") != "a/b" || f.Path("/a") != "/a" || (&File{Dir: "/d"}).Path("a/b") != "/d/a/b" {
		t.Errorf("a/b at %q", f.Path("a/b"))
	}
	for file, want := range map[string]string{
		"bad.yml":  "functions.a.environment_file: three.yml:2: env: unknown field, want one of environment",
		"gone.yml": "functions.a.environment_file: open four.yml: no such file",
		"none.yml": "stack file: open none.yml: no such file",
	} {
		if _, err := Read(file); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", file, err, want)
		}
	}
}

// TestReadBounds checks that an endless file is read only up to the limit.
func TestReadBounds(t *testing.T) {
	if _, err := Read("/dev/zero"); err == nil || !strings.Contains(err.Error(), "/dev/zero: want at most 4194304 bytes") {
		t.Errorf("stack file: %v", err)
	}
	file := filepath.Join(t.TempDir(), "stack.yml")
	if err := os.WriteFile(file, []byte(head+"functions: {a: {environment_file: [/dev/zero]}}"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(file); err == nil || !strings.Contains(err.Error(), "functions.a.environment_file: /dev/zero: want at most") {
		t.Errorf("environment_file: %v", err)
	}
}

func TestNames(t *testing.T) {
	f := &File{Functions: map[string]Function{"ocr-text": {}, "ocr-detect": {}, "wait": {}}}
	for filter, want := range map[string][]string{
		"":      {"ocr-detect", "ocr-text", "wait"},
		"ocr-*": {"ocr-detect", "ocr-text"},
		"wait":  {"wait"},
	} {
		if got, err := f.Names(filter); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q: %v, %v, want %v", filter, got, err, want)
		}
	}
	for filter, want := range map[string]string{"ocr": `"ocr" matches none of: ocr-detect, ocr-text, wait`, "[": `"[": want a name`} {
		if _, err := f.Names(filter); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", filter, err, want)
		}
	}
	if _, err := (&File{}).Names(""); err == nil {
		t.Error("no functions: no error")
	}
}

// FuzzParse checks that input is either parsed or refused with the file's name, always with the
// same result, and without the environment if it names no variable.
func FuzzParse(f *testing.F) {
	for _, s := range []string{full, head, "a: &a [*a]", "${A:-${B}}$$", head + "functions:\n  a: &a\n    <<: *a", "<<: {<<: 1}", head + "x-a: &a [[1]]\nfunctions: {a: {labels: *a}}"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		got, err := Parse("f", data, lookup)
		again, err2 := Parse("f", data, lookup)
		if (err == nil) != (err2 == nil) || !reflect.DeepEqual(got, again) {
			t.Fatalf("two results: %v, %v", err, err2)
		}
		if err != nil && !strings.HasPrefix(err.Error(), "f:") {
			t.Fatalf("error without the file: %v", err)
		}
		if err == nil && got.Provider.Name != "openfaas" {
			t.Fatalf("provider %q was let through", got.Provider.Name)
		}
	})
}
