package stack

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// File is a stack.yml.
type File struct {
	Version       string              `yaml:"version"`
	Provider      Provider            `yaml:"provider"`
	Functions     map[string]Function `yaml:"functions"`
	Configuration Configuration       `yaml:"configuration"`

	Name string `yaml:"-"` // name of the file, for messages
	Dir  string `yaml:"-"` // base of relative paths; empty: the current folder, as with faas-cli
}

// Provider says where the functions are deployed.
type Provider struct {
	Name    string `yaml:"name"` // must be openfaas
	Gateway string `yaml:"gateway"`
	Network string `yaml:"network"` // from old files; ignored
}

// Function is a function of the stack.
type Function struct {
	Lang        string            `yaml:"lang"`    // name of the template
	Handler     string            `yaml:"handler"` // folder of the handler
	Image       string            `yaml:"image"`
	FProcess    string            `yaml:"fprocess"`
	Environment map[string]string `yaml:"environment"`
	// YAML files with `environment:`; they override Environment, later ones override earlier ones.
	EnvironmentFile        []string          `yaml:"environment_file"`
	Secrets                []string          `yaml:"secrets"`
	Constraints            []string          `yaml:"constraints"`
	Labels                 map[string]string `yaml:"labels"`
	Annotations            map[string]string `yaml:"annotations"`
	Limits                 *Resources        `yaml:"limits"`
	Requests               *Resources        `yaml:"requests"`
	ReadOnlyRootFilesystem bool              `yaml:"readonly_root_filesystem"`
	Namespace              string            `yaml:"namespace"`
	SkipBuild              bool              `yaml:"skip_build"`
	BuildArgs              map[string]string `yaml:"build_args"`
	BuildOptions           []string          `yaml:"build_options"`
	BuildSecrets           map[string]string `yaml:"build_secrets"`
	Platforms              string            `yaml:"platforms"`
}

// Resources are a function's resources in Kubernetes' notation: 128Mi, 500m.
type Resources struct {
	Memory string `yaml:"memory"`
	CPU    string `yaml:"cpu"`
}

// Configuration configures builds.
type Configuration struct {
	Templates []Template `yaml:"templates"`
	Copy      []string   `yaml:"copy"` // further paths for the build contexts
}

// Template says where a lang comes from.
type Template struct {
	Name   string `yaml:"name"`
	Source string `yaml:"source"` // a git repository
}

// MaxSize is the maximum size of a stack.yml, in bytes. A file with thousands of functions is
// smaller.
const MaxSize = 4 << 20

// Parse parses a stack.yml. name is used in messages. lookup returns environment variables. Each
// error begins with NAME, and :LINE if known.
func Parse(name string, data []byte, lookup func(string) (string, bool)) (*File, error) {
	if len(data) > MaxSize {
		return nil, fmt.Errorf("%s: %d bytes, want at most %d", name, len(data), MaxSize)
	}
	text, err := substitute(name, string(data), lookup)
	if err != nil {
		return nil, err
	}
	var f File
	if err := decode(name, text, &f); err != nil {
		return nil, err
	}
	f.Name = name
	var errs []error
	if f.Provider.Name != "openfaas" {
		errs = append(errs, fmt.Errorf("%s: provider.name: %q, want openfaas", name, f.Provider.Name))
	}
	if f.Version != "" && f.Version != "1.0" {
		errs = append(errs, fmt.Errorf("%s: version: %q, want 1.0", name, f.Version))
	}
	for _, n := range slices.Sorted(maps.Keys(f.Functions)) {
		if !functionName.MatchString(n) || n == "." || n == ".." {
			errs = append(errs, fmt.Errorf("%s: functions: %q, want a name of letters, digits, '-', '_' and '.', at most 253", name, n))
		}
	}
	return &f, errors.Join(errs...)
}

// functionName is the form of names that both the API and folders accept.
var functionName = regexp.MustCompile(`^[a-zA-Z0-9._-]{1,253}$`)

// decode decodes YAML into v, a pointer to a struct, and refuses unknown fields.
func decode(name, text string, v any) error {
	var root yaml.Node
	if err := yaml.Unmarshal([]byte(text), &root); err != nil {
		return located(name, err)
	}
	if len(root.Content) == 0 {
		return fmt.Errorf("%s: empty, want YAML", name)
	}
	// Decode finds aliases that contain themselves, so check need not.
	if err := root.Decode(v); err != nil {
		return located(name, err)
	}
	k := keys{name: name, left: maxNodes}
	k.check(root.Content[0], reflect.TypeOf(v).Elem(), "")
	return errors.Join(k.errs...)
}

var lineForm = regexp.MustCompile(`^(?:yaml: )?line (\d+): (.*)$`)

// located turns the YAML package's messages into NAME:LINE: message.
func located(name string, err error) error {
	messages := []string{err.Error()}
	if t := (*yaml.TypeError)(nil); errors.As(err, &t) {
		messages = t.Errors
	}
	var errs []error
	for _, m := range messages {
		if part := lineForm.FindStringSubmatch(m); part != nil {
			errs = append(errs, fmt.Errorf("%s:%s: %s", name, part[1], part[2]))
		} else {
			errs = append(errs, fmt.Errorf("%s: %s", name, strings.TrimPrefix(m, "yaml: ")))
		}
	}
	return errors.Join(errs...)
}

// maxNodes bounds the expansion of aliases.
const maxNodes = 1 << 20

// keys finds fields that a type does not have.
type keys struct {
	name string
	left int
	errs []error
}

func (k *keys) check(n *yaml.Node, t reflect.Type, path string) {
	if k.left--; k.left < 0 {
		if k.left == -1 {
			k.errs = append(k.errs, fmt.Errorf("%s: aliases expand to more than %d values", k.name, maxNodes))
		}
		return
	}
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case t.Kind() == reflect.Slice && n.Kind == yaml.SequenceNode:
		for i, c := range n.Content {
			k.check(c, t.Elem(), fmt.Sprintf("%s[%d]", path, i))
		}
	case n.Kind != yaml.MappingNode: // Decode reports such a node with its line
	case t.Kind() == reflect.Map:
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == "<<" {
				k.merged(n.Content[i+1], t, path)
			} else {
				k.check(n.Content[i+1], t.Elem(), strings.TrimPrefix(path+"."+n.Content[i].Value, "."))
			}
		}
	case t.Kind() == reflect.Struct:
		k.fields(n, t, path)
	}
}

// merged checks the value of <<: a mapping or a list of mappings.
func (k *keys) merged(n *yaml.Node, t reflect.Type, path string) {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Kind != yaml.SequenceNode {
		k.check(n, t, path)
		return
	}
	for _, c := range n.Content {
		k.check(c, t, path)
	}
}

func (k *keys) fields(n *yaml.Node, t reflect.Type, path string) {
	known := map[string]reflect.Type{}
	for i := range t.NumField() {
		if tag := t.Field(i).Tag.Get("yaml"); tag != "-" {
			known[tag] = t.Field(i).Type
		}
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		at := strings.TrimPrefix(path+"."+key.Value, ".")
		switch field, ok := known[key.Value]; {
		case ok:
			k.check(value, field, at)
		case key.Value == "<<":
			k.merged(value, t, path)
		case path == "" && strings.HasPrefix(key.Value, "x-"): // users put anchors there
		default:
			k.errs = append(k.errs, fmt.Errorf("%s:%d: %s: unknown field, want one of %s", k.name, key.Line, at, strings.Join(slices.Sorted(maps.Keys(known)), ", ")))
		}
	}
}

// Read reads a stack file and adds the variables of the functions' environment_file to their
// environments. As with faas-cli, relative paths in the file are relative to the current folder,
// not to the folder of the file.
func Read(file string) (*File, error) {
	b, err := read(file)
	if err != nil {
		return nil, fmt.Errorf("stack file: %w", err)
	}
	f, err := Parse(file, b, os.LookupEnv)
	if err != nil {
		return nil, err
	}
	for name, fn := range f.Functions {
		if fn.Environment, err = f.environment(fn); err != nil {
			return nil, fmt.Errorf("%s: functions.%s.environment_file: %w", file, name, err)
		}
		f.Functions[name] = fn
	}
	return f, nil
}

// read reads a file of at most MaxSize bytes, even if its size is not known in advance.
func read(name string) ([]byte, error) {
	f, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, MaxSize+1))
	if err == nil && len(b) > MaxSize {
		err = fmt.Errorf("%s: want at most %d bytes", name, MaxSize)
	}
	return b, err
}

func (f *File) environment(fn Function) (map[string]string, error) {
	env := maps.Clone(fn.Environment)
	for _, file := range fn.EnvironmentFile {
		at := f.Path(file)
		b, err := read(at)
		if err != nil {
			return nil, err
		}
		var e struct {
			Environment map[string]string `yaml:"environment"`
		}
		if err := decode(at, string(b), &e); err != nil {
			return nil, err
		}
		if env == nil {
			env = map[string]string{}
		}
		maps.Copy(env, e.Environment)
	}
	return env, nil
}

// Path resolves a path in the file.
func (f *File) Path(p string) string {
	if filepath.IsAbs(p) {
		return p
	}
	return filepath.Join(f.Dir, p)
}

// Names returns the names of the functions that match filter, in order. In filter, * matches
// anything; "" matches all. A filter without a match is an error.
func (f *File) Names(filter string) ([]string, error) {
	all := slices.Sorted(maps.Keys(f.Functions))
	if len(all) == 0 {
		return nil, errors.New("the stack has no functions")
	}
	names := slices.Clone(all)
	var bad error
	names = slices.DeleteFunc(names, func(n string) bool {
		ok, err := path.Match(cmp.Or(filter, "*"), n)
		bad = errors.Join(bad, err)
		return !ok
	})
	if bad != nil {
		return nil, fmt.Errorf("--filter %q: want a name in which * stands for anything", filter)
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("--filter %q matches none of: %s", filter, strings.Join(all, ", "))
	}
	return names, nil
}
