package recorded

import (
	"fmt"
	"io"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/sim"
)

// WriteScenario writes the scenario as YAML that [sim.Parse] reads, with the notes as comments.
func (r *Run) WriteScenario(w io.Writer, from string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "# Made from %s by `stagecoach sim --recorded`.\n", strings.ReplaceAll(from, "\n", " "))
	for _, n := range r.Notes {
		fmt.Fprintf(&b, "# %s\n", n)
	}
	s := reflect.ValueOf(r.Scenario)
	for i := range s.NumField() {
		v, name := s.Field(i), yamlName(s.Type().Field(i))
		if name == "" || v.IsZero() {
			continue
		}
		if v.Kind() != reflect.Slice {
			fmt.Fprintf(&b, "%s: %s\n", name, flow(v))
			continue
		}
		fmt.Fprintf(&b, "%s:\n", name)
		for k := range v.Len() {
			fmt.Fprintf(&b, "  - %s\n", flow(v.Index(k)))
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// yamlName returns the name of a field; "": it is not written.
func yamlName(f reflect.StructField) string {
	if name, _, _ := strings.Cut(f.Tag.Get("yaml"), ","); name != "-" && f.IsExported() {
		return name
	}
	return ""
}

// flow returns a value in YAML's flow style. Fields that are zero are left out.
func flow(v reflect.Value) string {
	switch x := v.Interface().(type) {
	case time.Duration:
		return x.String()
	case sim.Milli:
		return fmt.Sprintf("%dm", x)
	}
	switch v.Kind() {
	case reflect.Pointer:
		return flow(v.Elem())
	case reflect.Struct:
		return "{" + strings.Join(fields(v), ", ") + "}"
	case reflect.Slice:
		var items []string
		for i := range v.Len() {
			items = append(items, flow(v.Index(i)))
		}
		return "[" + strings.Join(items, ", ") + "]"
	case reflect.String:
		return quoted(v.String())
	case reflect.Float64:
		return strconv.FormatFloat(v.Float(), 'f', -1, 64)
	}
	return fmt.Sprint(v.Interface())
}

// fields returns the fields of a struct that are not zero, with those of inlined structs.
func fields(v reflect.Value) (out []string) {
	for i := range v.NumField() {
		f, x := v.Type().Field(i), v.Field(i)
		if f.Anonymous && x.Kind() == reflect.Struct {
			out = append(out, fields(x)...)
		} else if name := yamlName(f); name != "" && !x.IsZero() {
			out = append(out, name+": "+flow(x))
		}
	}
	return out
}

// plain matches text that needs no quotes.
var plain = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_./-]*$`)

func quoted(text string) string {
	if plain.MatchString(text) && !strings.EqualFold(text, "null") {
		return text
	}
	return strconv.Quote(text)
}
