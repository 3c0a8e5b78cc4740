package node

import (
	"encoding/json"
	"maps"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/golden"
)

// TestOrdersHaveNoOtherFields compares the fields of orders with those that the previous version
// knows. `make test-upgrade RECORD=1` writes the file with the code of that version.
func TestOrdersHaveNoOtherFields(t *testing.T) {
	const file = "previous-order-fields.txt"
	now := orderFields("", fill(reflect.TypeFor[Order](), nil))
	if golden.Rewriting() {
		golden.Compare(t, file, strings.Join(now, "\n")+"\n")
		return
	}
	b, err := os.ReadFile("testdata/" + file)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range strings.Fields(string(b)) {
		if !slices.Contains(now, f) {
			t.Errorf("%s: orders of the previous version have this field, and this version refuses it", f)
		}
	}
	sendable(t, strings.Fields(string(b)))
}

// orderFields lists the fields of a value's JSON, sorted.
func orderFields(path string, v any) []string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	var doc any
	if err := json.Unmarshal(b, &doc); err != nil {
		panic(err)
	}
	found := map[string]bool{}
	var walk func(path string, v any)
	walk = func(path string, v any) {
		switch v := v.(type) {
		case map[string]any:
			for name, v := range v {
				found[strings.TrimPrefix(path+"."+name, ".")] = true
				walk(path+"."+name, v)
			}
		case []any:
			for _, v := range v {
				walk(path, v)
			}
		}
	}
	walk(path, doc)
	return slices.Sorted(maps.Keys(found))
}

// fill returns a value whose fields are all set.
func fill(t reflect.Type, around []reflect.Type) any {
	v := reflect.New(t).Elem()
	around = append(around, t)
	switch t.Kind() {
	case reflect.Struct:
		for i := range t.NumField() {
			if t.Field(i).IsExported() && !slices.Contains(around, t.Field(i).Type) {
				v.Field(i).Set(reflect.ValueOf(fill(t.Field(i).Type, around)).Convert(t.Field(i).Type))
			}
		}
	case reflect.Slice:
		v.Set(reflect.Append(v, reflect.ValueOf(fill(t.Elem(), around)).Convert(t.Elem())))
	case reflect.Map:
		v.Set(reflect.MakeMap(t))
		v.SetMapIndex(reflect.ValueOf(fill(t.Key(), around)).Convert(t.Key()), reflect.ValueOf(fill(t.Elem(), around)).Convert(t.Elem()))
	case reflect.Pointer:
		p := reflect.New(t.Elem())
		p.Elem().Set(reflect.ValueOf(fill(t.Elem(), around)).Convert(t.Elem()))
		v.Set(p)
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Float64:
		v.SetFloat(1)
	case reflect.Uint, reflect.Uint8, reflect.Uint32, reflect.Uint64:
		v.SetUint(1)
	case reflect.Int, reflect.Int32, reflect.Int64:
		v.SetInt(1)
	default:
		panic(t.String())
	}
	return v.Interface()
}
