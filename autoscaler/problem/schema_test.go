package problem

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/stagecoach-serving/stagecoach/internal/yamlfile"
)

// object is a JSON object of the schema.
type object = map[string]any

// schema is docs/schema/decide.schema.json.
type schema struct{ root object }

func readSchema(t *testing.T) schema {
	t.Helper()
	text, err := os.ReadFile("../../docs/schema/decide.schema.json")
	if err != nil {
		t.Fatal(err)
	}
	var s schema
	if err := json.Unmarshal(text, &s.root); err != nil {
		t.Fatal(err)
	}
	return s
}

// follow returns what a node refers to, or the node itself, and the name of the definition.
func (s schema) follow(node object) (object, string) {
	ref, ok := node["$ref"].(string)
	if !ok {
		return node, ""
	}
	name := strings.TrimPrefix(ref, "#/$defs/")
	return s.root["$defs"].(object)[name].(object), name
}

// TestSchemaHasTheFieldsOfTheParser compares the schema with the parser's types: each has all
// fields of the other, with the same types.
func TestSchemaHasTheFieldsOfTheParser(t *testing.T) {
	s := readSchema(t)
	used := map[string]bool{}
	s.compare(t, "problem", s.root, reflect.TypeFor[Problem](), used)
	used["name"] = true // within names too
	if have := slices.Sorted(maps.Keys(s.root["$defs"].(object))); !slices.Equal(have, slices.Sorted(maps.Keys(used))) {
		t.Errorf("definitions %v, of which %v are used", have, slices.Sorted(maps.Keys(used)))
	}
}

func (s schema) compare(t *testing.T, path string, node object, typ reflect.Type, used map[string]bool) {
	t.Helper()
	node, def := s.follow(node)
	if def != "" {
		used[def] = true
	}
	for typ.Kind() == reflect.Pointer {
		typ = typ.Elem()
	}
	leaf := func(wants ...string) {
		t.Helper()
		if got, _ := node["type"].(string); !slices.Contains(wants, got) && !slices.Contains(wants, def) {
			t.Errorf("%s: the schema has %q %q, the parser %v", path, got, def, typ)
		}
	}
	switch {
	case typ == reflect.TypeFor[time.Duration]():
		leaf("duration")
	case typ == reflect.TypeFor[yamlfile.Bytes]():
		leaf("bytes")
	case typ == reflect.TypeFor[yamlfile.Milli]():
		leaf("cpu")
	case typ == reflect.TypeFor[[]string]():
		leaf("names")
	case typ.Kind() == reflect.String:
		leaf("string")
	case typ.Kind() == reflect.Bool:
		leaf("boolean")
	case typ.Kind() == reflect.Int:
		leaf("integer")
	case typ.Kind() == reflect.Float64:
		leaf("number")
	case typ.Kind() == reflect.Slice:
		leaf("array")
		s.compare(t, path+"[]", node["items"].(object), typ.Elem(), used)
	case typ.Kind() == reflect.Struct:
		leaf("object")
		fields := parsed(typ)
		props, _ := node["properties"].(object)
		if a, b := slices.Sorted(maps.Keys(props)), slices.Sorted(maps.Keys(fields)); !slices.Equal(a, b) {
			t.Errorf("%s: the schema has %v, the parser %v", path, a, b)
		}
		if node["additionalProperties"] != false {
			t.Errorf("%s: the schema takes other fields, the parser none", path)
		}
		for name, typ := range fields {
			if prop, ok := props[name].(object); ok {
				s.compare(t, path+"."+name, prop, typ, used)
			}
		}
	default:
		t.Errorf("%s: no rule for %v", path, typ)
	}
}

// parsed returns the fields that the parser knows, by their names in YAML.
func parsed(typ reflect.Type) map[string]reflect.Type {
	out := map[string]reflect.Type{}
	for i := range typ.NumField() {
		f := typ.Field(i)
		tag, inline := strings.CutSuffix(f.Tag.Get("yaml"), ",inline")
		switch {
		case inline:
			maps.Copy(out, parsed(f.Type))
		case tag != "" && tag != "-":
			out[tag] = f.Type
		}
	}
	return out
}

// leaf is a value of a document with its schema.
type leaf struct {
	path string
	node object
	set  func(any)
}

// leaves returns the values of a document, and marks the schema's properties that it has.
func (s schema) leaves(path string, node object, value any, set func(any), seen map[string]bool) (out []leaf) {
	node, def := s.follow(node)
	switch v := value.(type) {
	case object:
		for _, name := range slices.Sorted(maps.Keys(v)) {
			at := strings.TrimPrefix(path+"."+name, ".")
			seen[def+"."+name] = true
			prop, _ := node["properties"].(object)[name].(object)
			out = append(out, s.leaves(at, prop, v[name], func(x any) { v[name] = x }, seen)...)
		}
	case []any:
		items, ok := node["items"].(object)
		if !ok {
			return nil // of names
		}
		for i := range v {
			out = append(out, s.leaves(fmt.Sprintf("%s[%d]", path, i), items, v[i], func(x any) { v[i] = x }, seen)...)
		}
	default:
		out = append(out, leaf{path, node, set})
	}
	return out
}

// TestSchemaHasTheBoundsOfTheParser changes each value of a problem with every field. The parser
// takes the schema's bounds, and refuses what is beyond them.
func TestSchemaHasTheBoundsOfTheParser(t *testing.T) {
	text, err := os.ReadFile("testdata/full.yml")
	if err != nil {
		t.Fatal(err)
	}
	s := readSchema(t)
	var doc object
	if err := yaml.Unmarshal(text, &doc); err != nil {
		t.Fatal(err)
	}
	refused := func(path string, value any) error {
		t.Helper()
		text, err := yaml.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		_, err = Read(strings.NewReader(string(text)))
		if err == nil {
			return nil
		}
		for line := range strings.Lines(err.Error()) {
			if strings.HasPrefix(line, path+":") {
				return fmt.Errorf("%s with %v: %s", path, value, line)
			}
		}
		return nil // another field does not fit this one
	}
	seen := map[string]bool{}
	all := s.leaves("", s.root, doc, nil, seen)
	for def, node := range s.root["$defs"].(object) {
		props, _ := node.(object)["properties"].(object)
		for name := range props {
			if !seen[def+"."+name] {
				t.Errorf("testdata/full.yml has no %s of a %s", name, def)
			}
		}
	}
	// together with others, or of all nodes together
	together := []string{"share", "max", "count", "gpus", "join", "length"}
	for _, l := range all {
		if err := refused(l.path, "its own value"); err != nil {
			t.Fatal(err)
		}
		was := valueAt(t, doc, l.path)
		field := l.path[strings.LastIndexByte(l.path, '.')+1:]
		for bound, beyond := range map[string]float64{"minimum": -1, "maximum": 1, "exclusiveMinimum": 0} {
			limit, ok := l.node[bound].(float64)
			if !ok {
				continue
			}
			// 0 means the default
			if bound != "exclusiveMinimum" && limit != 0 && !slices.Contains(together, field) {
				l.set(number(l.node, limit))
				if err := refused(l.path, limit); err != nil {
					t.Errorf("the schema takes it: %v", err)
				}
			}
			value := limit + beyond
			if bound == "exclusiveMinimum" || value == 0 { // 0 means the default
				value = limit - 1
			}
			if bound == "minimum" && limit == 1 {
				value = -1
			}
			l.set(number(l.node, value))
			if refused(l.path, value) == nil {
				t.Errorf("%s: the parser takes %v, the schema does not", l.path, value)
			}
		}
		if values, ok := l.node["enum"].([]any); ok {
			for _, v := range values {
				l.set(v)
				if err := refused(l.path, v); err != nil {
					t.Errorf("the schema takes it: %v", err)
				}
			}
			l.set("else")
			if refused(l.path, "else") == nil {
				t.Errorf("%s: the parser takes another word, the schema does not", l.path)
			}
		}
		l.set([]any{object{}})
		if refused(l.path, "a list") == nil {
			t.Errorf("%s: the parser takes a list, the schema does not", l.path)
		}
		l.set(was)
	}
	if len(all) < 100 {
		t.Errorf("%d values, want all", len(all))
	}
}

func number(node object, v float64) any {
	if node["type"] == "integer" {
		return int(math.Round(v))
	}
	return v
}

// valueAt returns the value at a path.
func valueAt(t *testing.T, doc any, path string) any {
	t.Helper()
	for part := range strings.SplitSeq(path, ".") {
		name, index, list := strings.Cut(part, "[")
		if doc = doc.(object)[name]; list {
			i := 0
			if _, err := fmt.Sscanf(index, "%d]", &i); err != nil {
				t.Fatal(err)
			}
			doc = doc.([]any)[i]
		}
	}
	return doc
}
