package control

import (
	"encoding"
	"encoding/json"
	"reflect"
)

// lean returns v, a struct of plan, for package json without the fields that are zero: most of a Snapshot are, most of the time. What
// encodes itself is left to that.
func lean(v any) any { return leanValue(reflect.ValueOf(v)) }

func leanValue(v reflect.Value) any {
	if v.Kind() == reflect.Struct || v.Kind() == reflect.Slice {
		switch v.Interface().(type) {
		case json.Marshaler, encoding.TextMarshaler:
			return v.Interface()
		}
	}
	switch v.Kind() {
	case reflect.Struct:
		out := make(map[string]any, v.NumField())
		for i := range v.NumField() {
			f := v.Field(i)
			if f.IsZero() || f.Kind() == reflect.Slice && f.Len() == 0 {
				continue
			}
			out[v.Type().Field(i).Name] = leanValue(f)
		}
		return out
	case reflect.Slice:
		out := make([]any, v.Len())
		for i := range out {
			out[i] = leanValue(v.Index(i))
		}
		return out
	}
	return v.Interface()
}
