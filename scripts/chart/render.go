// Package chart renders and checks the Helm chart in charts/stagecoach, without a cluster and
// without helm. It is a module of its own, so that its libraries are not the product's.
//
// It has the parts of Helm that the chart uses: sprig's functions, include, required, lookup,
// toYaml, and the validation of values.
package chart

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"

	"github.com/Masterminds/sprig/v3"
	"github.com/santhosh-tekuri/jsonschema/v6"
	"sigs.k8s.io/yaml"
)

// Release is an installation of the chart.
type Release struct {
	Name, Namespace string
	// Secrets are what lookup finds, by name.
	Secrets map[string]any
	// Replicas are those of the StatefulSets that lookup finds, by name.
	Replicas map[string]int
	// Random replaces what is drawn by chance; nil: it is drawn.
	Random func(kind string) string
}

// Render returns the files of a chart's manifests, by their paths below templates. Files without
// manifests are left out.
func Render(dir string, r Release, values map[string]any) (map[string]string, error) {
	chart, err := readYAML(filepath.Join(dir, "Chart.yaml"))
	if err != nil {
		return nil, err
	}
	defaults, err := readYAML(filepath.Join(dir, "values.yaml"))
	if err != nil {
		return nil, err
	}
	merged := merge(defaults, values)
	if err := validate(filepath.Join(dir, "values.schema.json"), merged); err != nil {
		return nil, err
	}
	t := template.New("chart").Option("missingkey=zero")
	t.Funcs(r.functions(t))
	folder := filepath.Join(dir, "templates")
	if err := parse(t, folder); err != nil {
		return nil, err
	}
	top := map[string]any{
		"Values":  merged,
		"Release": map[string]any{"Name": r.Name, "Namespace": r.Namespace, "Service": "Helm", "IsInstall": true, "IsUpgrade": false, "Revision": 1},
		"Chart":   map[string]any{"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]},
	}
	out := map[string]string{}
	for _, f := range t.Templates() {
		name := f.Name()
		if ext := filepath.Ext(name); ext != ".yaml" && ext != ".txt" {
			continue
		}
		var b bytes.Buffer
		if err := f.Execute(&b, top); err != nil {
			return nil, err
		}
		// As Helm does, for a value that is missing.
		if text := strings.ReplaceAll(b.String(), "<no value>", ""); strings.TrimSpace(text) != "" {
			out[name] = text
		}
	}
	return out, nil
}

// parse reads the templates in a folder.
func parse(t *template.Template, folder string) error {
	return filepath.WalkDir(folder, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		name, err := filepath.Rel(folder, path)
		if err == nil {
			_, err = t.New(name).Parse(string(b))
		}
		return err
	})
}

// functions are those of Helm that the chart uses.
func (r Release) functions(t *template.Template) template.FuncMap {
	f := sprig.TxtFuncMap()
	maps.Copy(f, template.FuncMap{
		"include": func(name string, data any) (string, error) {
			var b strings.Builder
			err := t.ExecuteTemplate(&b, name, data)
			return b.String(), err
		},
		"required": func(message string, v any) (any, error) {
			if v == nil || v == "" {
				return nil, errors.New(message)
			}
			return v, nil
		},
		"lookup": func(_, kind, _, name string) map[string]any {
			if have, ok := r.Secrets[name].(map[string]any); ok && kind == "Secret" {
				return map[string]any{"data": have}
			}
			if have, ok := r.Replicas[name]; ok && kind == "StatefulSet" {
				return map[string]any{"spec": map[string]any{"replicas": have}}
			}
			return map[string]any{}
		},
		"toYaml": func(v any) (string, error) {
			b, err := yaml.Marshal(v)
			return strings.TrimSuffix(string(b), "\n"), err
		},
	})
	if r.Random != nil {
		for _, kind := range []string{"randBytes", "randAlphaNum"} {
			f[kind] = func(int) string { return r.Random(kind) }
		}
	}
	return f
}

// merge returns the defaults with values over them. A value of null removes a default.
func merge(defaults, values map[string]any) map[string]any {
	out := maps.Clone(defaults)
	for k, v := range values {
		have, ok1 := out[k].(map[string]any)
		over, ok2 := v.(map[string]any)
		switch {
		case v == nil:
			delete(out, k)
		case ok1 && ok2:
			out[k] = merge(have, over)
		default:
			out[k] = v
		}
	}
	return out
}

// validate checks values against a JSON schema.
func validate(file string, values map[string]any) error {
	schema, err := jsonschema.NewCompiler().Compile(file)
	if err == nil {
		err = schema.Validate(values)
	}
	return err
}

func readYAML(file string) (map[string]any, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	out := map[string]any{}
	if err := yaml.Unmarshal(b, &out); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return out, nil
}

// Manifests returns the manifests in files, each with the file that it is from, in the order of
// files.
func Manifests(files map[string]string) ([]string, error) {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if filepath.Ext(name) != ".yaml" {
			continue
		}
		for _, text := range strings.Split("\n"+files[name], "\n---") {
			var object map[string]any
			if err := yaml.UnmarshalStrict([]byte(text), &object); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			if len(object) > 0 {
				out = append(out, "# Source: "+name+"\n"+strings.TrimSpace(text)+"\n")
			}
		}
	}
	return out, nil
}
