package main

import (
	"bytes"
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
)

// The pages of reference name what the code knows, all of it and nothing else.

// table is a page's tables: rows by the heading above them.
type table map[string][][]string

func reference(t *testing.T, page string) (tables table, text string) {
	t.Helper()
	b, err := os.ReadFile("../../docs/" + page)
	if err != nil {
		t.Fatal(err)
	}
	tables, text = table{}, string(b)
	heading := ""
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if h, ok := strings.CutPrefix(line, "## "); ok {
			heading = h
			tables[heading] = nil
		}
		if inner, ok := strings.CutPrefix(line, "| "); ok {
			cells := strings.Split(strings.ReplaceAll(strings.TrimSuffix(inner, "|"), `\|`, "\x00"), "|")
			for i, c := range cells {
				cells[i] = strings.ReplaceAll(strings.TrimSpace(c), "\x00", "|")
			}
			tables[heading] = append(tables[heading], cells)
		}
	}
	return tables, text
}

var code = regexp.MustCompile("`([^`]*)`")

// codes returns what stands in backquotes.
func codes(cell string) (all []string) {
	for _, m := range code.FindAllStringSubmatch(cell, -1) {
		all = append(all, m[1])
	}
	return all
}

// same compares two sets of names.
func sameNames(t *testing.T, where string, documented, known []string) {
	t.Helper()
	for _, name := range documented {
		if !slices.Contains(known, name) {
			t.Errorf("%s: the page names %q, which the code does not know", where, name)
		}
	}
	for _, name := range known {
		if !slices.Contains(documented, name) {
			t.Errorf("%s: %q is missing in the page", where, name)
		}
	}
}

var (
	helpFlag    = regexp.MustCompile(`^  -([-a-z]+)`)
	helpDefault = regexp.MustCompile(`\(default:? ?"?([^"]*?)"?\)$`)
)

// helpOf returns the flags of a command and their defaults, as its --help lists them.
func helpOf(t *testing.T, command string) map[string]string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, append(strings.Fields(command), "--help")...)
	cmd.Env = slices.DeleteFunc(append(os.Environ(), actAsMain+"=1"), func(s string) bool { return strings.HasPrefix(s, "OPENFAAS_URL=") })
	out, err := cmd.CombinedOutput()
	if cmd.ProcessState == nil || cmd.ProcessState.ExitCode() > 2 || cmd.ProcessState.ExitCode() == 1 {
		t.Fatalf("%s --help: %v\n%s", command, err, out)
	}
	flags, last := map[string]string{}, ""
	for line := range strings.Lines(string(out)) {
		line = strings.TrimRight(line, "\n")
		if m := helpFlag.FindStringSubmatch(line); m != nil {
			last = m[1]
			flags[last] = ""
		}
		if m := helpDefault.FindStringSubmatch(line); m != nil && last != "" {
			flags[last] = m[1]
		}
	}
	return flags
}

// allCommands are the commands with their verbs, as a user types them.
func allCommands() (all []string) {
	for _, c := range commands() {
		if len(c.verbs) == 0 {
			all = append(all, c.name)
		}
		for _, v := range c.verbs {
			if argument(v) {
				all = append(all, c.name)
			} else {
				all = append(all, c.name+" "+strings.Fields(v)[0])
			}
		}
	}
	return all
}

// TestCLIReference compares docs/cli.md with the help of each command.
func TestCLIReference(t *testing.T) {
	t.Parallel()
	tables, text := reference(t, "cli.md")
	const common = "Common flags"
	var documented []string
	for heading, rows := range tables {
		section := text[strings.Index(text, "## "+heading):]
		if end := strings.Index(section[3:], "\n## "); end >= 0 {
			section = section[:end+3]
		}
		if strings.Contains(section, "(#common-flags)") {
			rows = append(slices.Clone(rows), tables[common]...)
		}
		for _, c := range codes(heading) {
			words := slices.DeleteFunc(strings.Fields(strings.TrimPrefix(c, "stagecoach ")), func(w string) bool { return w != strings.ToLower(w) })
			name := strings.Join(words[:min(2, len(words))], " ")
			documented = append(documented, name)
			known := helpOf(t, name)
			var flags []string
			for _, row := range rows {
				for _, f := range codes(row[0]) {
					f = strings.TrimLeft(f, "-")
					if slices.Contains(flags, f) {
						t.Errorf("%s --%s is on the page twice", name, f)
					}
					flags = append(flags, f)
					if got := strings.Join(codes(row[1]), " "); known[f] != "" && got != known[f] {
						t.Errorf("%s --%s: the page says that its default is %q, want %q", name, f, got, known[f])
					}
				}
			}
			sameNames(t, name, flags, slices.Sorted(maps.Keys(known)))
		}
	}
	sameNames(t, "commands", documented, allCommands())
}

// TestAPIReference compares docs/api.md with the routes in the code.
func TestAPIReference(t *testing.T) {
	t.Parallel()
	known := []string{"GET /healthz", "GET /readyz", "GET /metrics", "ANY /function/NAME[/PATH]", "POST /async-function/NAME[/PATH]"}
	for _, path := range []string{"health/live", "health/ready", "models/NAME", "models/NAME/ready"} {
		known = append(known, "GET /v2/"+path)
	}
	known = append(known, "POST /v2/models/NAME/infer")
	for _, route := range systemRoutes(t) {
		if strings.Contains(route, " ") {
			known = append(known, strings.NewReplacer("{name}", "NAME", "{id}", "ID", "{$}", "").Replace(route))
		}
	}
	if len(known) < 25 {
		t.Fatalf("found %q, want all of them", known)
	}
	tables, _ := reference(t, "api.md")
	var documented []string
	for _, rows := range tables {
		for _, row := range rows {
			for _, c := range codes(row[0]) {
				if strings.Contains(c, " /") {
					documented = append(documented, c)
				}
			}
		}
	}
	sameNames(t, "routes", documented, known)
}

// TestAnnotationsReference compares docs/annotations.md with the code: all keys are there, the
// defaults are accepted, and the examples of refused values are refused.
func TestAnnotationsReference(t *testing.T) {
	t.Parallel()
	tables, _ := reference(t, "annotations.md")
	var documented []string
	for heading, rows := range tables {
		for _, row := range rows {
			for _, key := range codes(row[0]) {
				if !strings.Contains(key, ".") {
					continue // a value of one of them
				}
				documented = append(documented, key)
				if len(row) < 5 {
					continue // made by the platform
				}
				parse := func(values ...string) (pipeline.Function, error) {
					labels, annotations := map[string]string{}, map[string]string{pipeline.Prefix + "pipeline": "p"}
					for _, value := range values {
						if strings.Contains(heading, "Labels") {
							labels[key] = value
						} else {
							annotations[key] = value
						}
					}
					f, err := pipeline.Parse("f", "ns", labels, annotations)
					f.Batch = max(f.Batch, 1)
					if f.Async.Retry.Codes == nil {
						f.Async.Retry.Codes = pipeline.DefaultRetryCodes()
					}
					return f, err
				}
				without, _ := parse()
				for _, value := range codes(row[2]) {
					if with, err := parse(value); err != nil || !reflect.DeepEqual(with, without) {
						t.Errorf("%s: with the default of the page %+v, %v, want %+v", key, with, err, without)
					}
				}
				for _, value := range codes(row[4]) {
					if _, err := parse(value); err == nil || !strings.Contains(err.Error(), key) {
						t.Errorf("%s: %q is refused, says the page; got %v", key, value, err)
					}
				}
			}
		}
	}
	sameNames(t, "annotations and labels", documented, readKeys(t))
}

// readKeys are the labels and annotations that the code reads and makes.
func readKeys(t *testing.T) []string {
	t.Helper()
	known := []string{"com.openfaas.health.http.path", "com.openfaas.health.http.initialDelay", "com.openfaas.health.http.periodSeconds", "com.openfaas.ready.http.path", provider.StatusAnnotation, provider.ReplicasAnnotation, provider.GuessAnnotation, provider.FailureAnnotation, provider.VariantsAnnotation, provider.BatchAnnotation, provider.AccuracyAnnotation}
	find := func(file, within, prefix, form string, least int) {
		t.Helper()
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		_, after, _ := bytes.Cut(b, []byte(within))
		body, _, _ := bytes.Cut(after, []byte("\n}\n")) // of that function alone
		all := regexp.MustCompile(form).FindAllSubmatch(body, -1)
		if len(all) < least {
			t.Errorf("%s: found %d keys, want at least %d: has it been rewritten?", file, len(all), least)
		}
		for _, m := range all {
			if key := prefix + string(m[1]); !slices.Contains(known, key) {
				known = append(known, key)
			}
		}
	}
	const field = `(?m)^\t\t"([a-z-]+)": +func\(`
	find("../../pipeline/parse.go", ") annotations(", pipeline.Prefix, field, 16)
	find("../../pipeline/policies.go", ") variantsAndPolicies(", pipeline.Prefix, field, 8)
	find("../../pipeline/parse.go", ") labels(", "com.openfaas.scale.", field, 8)
	find("../../pipeline/async.go", ") retries(", "com.openfaas.retry.", `\bread\("([a-z_]+)"`, 4)
	return known
}

// TestConfigReference compares docs/config.md with Config: fields, flags and defaults.
func TestConfigReference(t *testing.T) {
	t.Parallel()
	tables, _ := reference(t, "config.md")
	var documented, flags []string
	type field struct {
		value reflect.Value
		path  string
	}
	known := map[string]reflect.Value{}
	todo := []field{{reflect.ValueOf(defaultConfig()), ""}}
	for len(todo) > 0 {
		f := todo[0]
		todo = todo[1:]
		if f.value.Kind() == reflect.Struct {
			for i := range f.value.NumField() {
				if !f.value.Type().Field(i).IsExported() {
					continue
				}
				name := f.value.Type().Field(i).Tag.Get("yaml")
				todo = append(todo, field{f.value.Field(i), strings.TrimPrefix(f.path+"."+name, ".")})
			}
			continue
		}
		known[f.path] = f.value
	}
	for _, row := range slices.Concat(slices.Collect(maps.Values(tables))...) {
		for _, path := range codes(row[0]) {
			documented = append(documented, path)
			for _, f := range codes(row[1]) {
				flags = append(flags, strings.TrimLeft(f, "-"))
			}
			want, ok := known[path]
			if !ok || want.IsZero() || strings.HasPrefix(path, "node.") {
				continue
			}
			got := reflect.New(want.Type())
			if err := yaml.Unmarshal([]byte(strings.Join(codes(row[2]), " ")), got.Interface()); err != nil || !reflect.DeepEqual(got.Elem().Interface(), want.Interface()) {
				t.Errorf("%s: the page says that its default is %v, want %v (%v)", path, got.Elem(), want, err)
			}
		}
	}
	sameNames(t, "fields", documented, slices.Sorted(maps.Keys(known)))
	sameNames(t, "flags", append(flags, "config"), slices.Sorted(maps.Keys(helpOf(t, "up"))))
}

// TestProtocolReference compares docs/node-protocol.md with package node: orders, codes of errors,
// fields of all messages, and examples.
func TestProtocolReference(t *testing.T) {
	t.Parallel()
	tables, text := reference(t, "node-protocol.md")
	source, err := os.ReadFile("../../keysmanager/node/types.go")
	if err != nil {
		t.Fatal(err)
	}
	for heading, prefix := range map[string]string{"Orders": "Order", "Answers": "Code"} {
		var documented, known []string
		for _, row := range tables[heading][1:] {
			documented = append(documented, codes(row[0])...)
		}
		for _, m := range regexp.MustCompile(`(?m)^\t`+prefix+`\w+ +(?:\w+ +)?= "(\w+)"`).FindAllSubmatch(source, -1) {
			known = append(known, string(m[1]))
		}
		sameNames(t, heading, documented, known)
	}
	for _, m := range regexp.MustCompile(`json:"(\w+)`).FindAllSubmatch(source, -1) {
		if field := string(m[1]); !regexp.MustCompile("[\"`]" + field + "[\"`:]").MatchString(text) {
			t.Errorf("the page says nothing of the field %q", field)
		}
	}
	for heading, of := range map[string]any{"Announcements": &node.Inventory{}, "Orders": &node.Order{}} {
		_, section, _ := strings.Cut(text, "\n## "+heading)
		_, example, _ := strings.Cut(section, "```json\n")
		example, _, _ = strings.Cut(example, "```")
		d := json.NewDecoder(strings.NewReader(example))
		d.DisallowUnknownFields()
		if err := d.Decode(of); err != nil {
			t.Errorf("%s: %v in\n%s", heading, err, example)
		}
	}
}

// TestLinksOfTheDocumentationExist checks that the links between pages, and to files of this
// repository, lead to something that exists.
func TestLinksOfTheDocumentationExist(t *testing.T) {
	t.Parallel()
	link := regexp.MustCompile(`\]\(([^):#]*)(#[^)]*)?\)`)
	pages := strings.Fields("README.md ARCHITECTURE.md CONTRIBUTING.md")
	entries, err := os.ReadDir("../../docs")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if strings.HasSuffix(e.Name(), ".md") {
			pages = append(pages, "docs/"+e.Name())
		}
	}
	for _, page := range pages {
		b, err := os.ReadFile("../../" + page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range link.FindAllSubmatch(b, -1) {
			if to := string(m[1]); to != "" {
				if _, err := os.Stat(filepath.Join("../..", filepath.Dir(page), to)); err != nil {
					t.Errorf("%s: %v", page, err)
				}
			}
		}
	}
}
