package node

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
)

// TestSpecTravelsWhole gives each field of a spec a value, and finds the values in the decoded
// order.
func TestSpecTravelsWhole(t *testing.T) {
	t.Parallel()
	want := validOrder
	v := reflect.ValueOf(&want.Spec).Elem()
	for i := range v.NumField() {
		field := v.Type().Field(i)
		switch f := v.Field(i); f.Kind() {
		case reflect.String:
			f.SetString("value of " + field.Name)
		case reflect.Int, reflect.Int64:
			f.SetInt(int64(i) + 1)
		case reflect.Bool:
			f.SetBool(true)
		case reflect.Map:
			f.Set(reflect.ValueOf(map[string]string{"name": "value"}))
		case reflect.Struct:
			f.Set(reflect.ValueOf(Options{RuntimeClass: "class", DropCapabilities: []string{"ALL"}, CDIDevices: []string{"a.b/c=d"}}))
		default:
			t.Fatalf("%s is a %s: teach this test", field.Name, f.Kind())
		}
		if tag := field.Tag.Get("json"); tag == "" || tag[0] == '-' || strings.ToLower(tag[:1]) != tag[:1] {
			t.Errorf("%s has the tag %q, want a name as the other fields have", field.Name, tag)
		}
	}
	b, err := json.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := DecodeOrder(b); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%s becomes %+v, %v, want %+v", b, got, err, want)
	}
}

// TestOrdersOfEarlierReleasesKeepTheirMeaning compares an order's bytes with those of the releases
// whose orders had the spec as raw JSON.
func TestOrdersOfEarlierReleasesKeepTheirMeaning(t *testing.T) {
	t.Parallel()
	const recorded = `{"v":1,"id":"A1","to":"B2","kind":"start","within":1000000000,"replica":"r-1",` +
		`"spec":{"function":"f.ns","namespace":"ns","image":"i","env":{"A":"\u003c"},"cpuMilli":250},"cpuMilli":500,"device":"GPU-a"}`
	o, err := DecodeOrder([]byte(recorded))
	if err != nil {
		t.Fatal(err)
	}
	if want := (Spec{Function: "f.ns", Namespace: "ns", Image: "i", Env: map[string]string{"A": "<"}, CPUMilli: 250}); !reflect.DeepEqual(o.Spec, want) {
		t.Errorf("spec %+v, want %+v", o.Spec, want)
	}
	if b, err := json.Marshal(o); err != nil || string(b) != recorded {
		t.Errorf("%s, %v; want %s", b, err, recorded)
	}
}
