// Package yamlfile reads the YAML files of users into structs, strictly: it refuses fields that it
// does not know, and each error has the path and the line of its field.
package yamlfile

import (
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// The bounds of a file.
const (
	maxFile  = 1 << 20 // bytes
	maxList  = 1000
	maxMerge = 8 // mappings merged within one another
	// values with those of aliases, which can stand for many more than the file has
	maxValues = 1 << 18
)

// Read reads YAML from r into v, a pointer to a struct whose fields have yaml tags. kind is what
// the file is, such as "scenario"; errors without a path begin with it. want describes the top
// level. If a field is unknown or its value has the wrong type, the error has the field's path, for
// example stages[2].service.mean. Read refuses files over 1 MiB and lists of over 1000 entries.
func Read(r io.Reader, kind, want string, v any) error {
	text, err := io.ReadAll(io.LimitReader(r, maxFile+1))
	if err != nil {
		return err
	}
	if len(text) > maxFile {
		return fmt.Errorf("%s: more than %d bytes, want at most that", kind, maxFile)
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(text, &doc); err != nil {
		return fmt.Errorf("%s: %w", kind, err)
	}
	if len(doc.Content) == 0 || doc.Content[0].Tag == "!!null" {
		return fmt.Errorf("%s: got nothing, want %s", kind, want)
	}
	d := &decoder{kind: kind}
	return d.decode("", doc.Content[0], reflect.ValueOf(v).Elem())
}

// decoder sets values from YAML nodes.
type decoder struct {
	kind   string
	values int // set so far
}

// decode sets v from n. Errors have the path of the faulty field.
func (d *decoder) decode(path string, n *yaml.Node, v reflect.Value) error {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Tag == "!!null" {
		return nil
	}
	if d.values++; d.values > maxValues {
		return fmt.Errorf("%s: line %d: more than %d values with those of aliases, want at most that", d.at(path), n.Line, maxValues)
	}
	_, own := v.Addr().Interface().(yaml.Unmarshaler)
	switch {
	case own || v.Type() == reflect.TypeFor[time.Duration]():
		return leaf(path, n, v)
	case v.Kind() == reflect.Struct:
		return d.mapping(path, n, v, 0)
	case v.Kind() == reflect.Slice:
		return d.slice(path, n, v)
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		return d.decode(path, n, v.Elem())
	}
	return leaf(path, n, v)
}

func leaf(path string, n *yaml.Node, v reflect.Value) error {
	kinds := map[reflect.Kind]string{
		reflect.Int: "a whole number", reflect.Uint64: "a whole number of 0 or more", reflect.Float64: "a number", reflect.Bool: "true or false", reflect.String: "text",
	}
	want := kinds[v.Kind()]
	if v.Type() == reflect.TypeFor[time.Duration]() {
		want = "a duration such as 100ms, 30s or 2h"
	}
	if n.Kind != yaml.ScalarNode {
		return fmt.Errorf("%s: line %d: got a list or mapping, want %s", path, n.Line, want)
	}
	if u, ok := v.Addr().Interface().(yaml.Unmarshaler); ok {
		if err := u.UnmarshalYAML(n); err != nil {
			return fmt.Errorf("%s: line %d: got %q, %w", path, n.Line, n.Value, err)
		}
		return nil
	}
	if v.Type() == reflect.TypeFor[time.Duration]() {
		d, err := time.ParseDuration(n.Value)
		if err != nil || d < 0 {
			return fmt.Errorf("%s: line %d: got %q, want %s", path, n.Line, n.Value, want)
		}
		v.SetInt(int64(d))
		return nil
	}
	// YAML's decoder truncates fractions
	whole := v.Kind() != reflect.Int && v.Kind() != reflect.Uint64 || n.ShortTag() == "!!int"
	if err := n.Decode(v.Addr().Interface()); err != nil || !whole {
		return fmt.Errorf("%s: line %d: got %q, want %s", path, n.Line, n.Value, want)
	}
	return nil
}

func (d *decoder) slice(path string, n *yaml.Node, v reflect.Value) error {
	// a single one may be written without brackets
	if n.Kind == yaml.ScalarNode && v.Type().Elem().Kind() == reflect.String {
		n = &yaml.Node{Kind: yaml.SequenceNode, Content: []*yaml.Node{n}}
	}
	if n.Kind != yaml.SequenceNode {
		return fmt.Errorf("%s: line %d: want a list", path, n.Line)
	}
	if len(n.Content) > maxList {
		return fmt.Errorf("%s: line %d: %d entries, want at most %d", path, n.Line, len(n.Content), maxList)
	}
	v.Set(reflect.MakeSlice(v.Type(), len(n.Content), len(n.Content)))
	var errs []error
	for i, c := range n.Content {
		errs = append(errs, d.decode(fmt.Sprintf("%s[%d]", path, i), c, v.Index(i)))
		if d.values > maxValues {
			break
		}
	}
	return errors.Join(errs...)
}

// mapping sets the fields of v. It decodes merged mappings (<<: *name) first, so that the
// mapping's own fields win.
func (d *decoder) mapping(path string, n *yaml.Node, v reflect.Value, depth int) error {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if n.Kind != yaml.MappingNode {
		return fmt.Errorf("%s: line %d: want a mapping with some of %s", d.at(path), n.Line, strings.Join(fields(v.Type()), ", "))
	}
	if depth > maxMerge {
		return fmt.Errorf("%s: line %d: more than %d mappings are merged into one another", d.at(path), n.Line, maxMerge)
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Tag == "!!merge" {
			if err := d.mapping(path, n.Content[i+1], v, depth+1); err != nil {
				return err
			}
		}
	}
	var errs []error
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		if key.Tag == "!!merge" {
			continue
		}
		field, ok := field(v, key.Value)
		switch {
		case !ok:
			errs = append(errs, fmt.Errorf("%s: line %d: no such field, want one of %s", join(path, key.Value), key.Line, strings.Join(fields(v.Type()), ", ")))
		case seen[key.Value]:
			errs = append(errs, fmt.Errorf("%s: line %d: given twice", join(path, key.Value), key.Line))
		default:
			seen[key.Value] = true
			field.SetZero() // from a merged mapping
			errs = append(errs, d.decode(join(path, key.Value), n.Content[i+1], field))
		}
	}
	return errors.Join(errs...)
}

// field returns a struct's field by its YAML name.
func field(v reflect.Value, name string) (reflect.Value, bool) {
	for i := range v.NumField() {
		tag, inline := strings.CutSuffix(v.Type().Field(i).Tag.Get("yaml"), ",inline")
		if inline {
			if f, ok := field(v.Field(i), name); ok {
				return f, true
			}
		} else if tag == name && name != "" && tag != "-" {
			return v.Field(i), true
		}
	}
	return reflect.Value{}, false
}

func fields(t reflect.Type) []string {
	var out []string
	for i := range t.NumField() {
		tag, inline := strings.CutSuffix(t.Field(i).Tag.Get("yaml"), ",inline")
		if inline {
			out = append(out, fields(t.Field(i).Type)...)
		} else if tag != "-" {
			out = append(out, tag)
		}
	}
	slices.Sort(out)
	return out
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// at returns the path for an error.
func (d *decoder) at(path string) string {
	if path == "" {
		return d.kind
	}
	return path
}
