package pipeline

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestKeysAreTheirTexts(t *testing.T) {
	for k, want := range map[Key]string{
		{"a", "ns"}: "a.ns", {"a.b", "ns"}: "a.b.ns", {"x.y.z", "ns"}: "x.y.z.ns",
		{"a", ""}: "a", {"a.b", ""}: "a.b.", {"", "ns"}: ".ns", {}: "",
	} {
		if got := k.String(); got != want {
			t.Errorf("%#v is %q, want %q", k, got, want)
		}
		if got := ParseKey(want); got != k {
			t.Errorf("%q is %#v, want %#v", want, got, k)
		}
		b, err := json.Marshal(map[Key]Key{k: k})
		var back map[Key]Key
		if err == nil {
			err = json.Unmarshal(b, &back)
		}
		if err != nil || string(b) != `{"`+want+`":"`+want+`"}` || back[k] != k || len(back) != 1 {
			t.Errorf("%#v became %s and %v, %v", k, b, back, err)
		}
	}
}

func TestNamed(t *testing.T) {
	for _, tc := range []struct {
		text, namespace string
		want            Key
		short           string
	}{
		{"a", "", Key{"a", "openfaas-fn"}, "a"},
		{"a", "openfaas-fn", Key{"a", "openfaas-fn"}, "a"},
		{"a", "b", Key{"a", "b"}, "a.b"},
		{"a.b", "", Key{"a", "b"}, "a.b"},
		{"a.b", "openfaas-fn", Key{"a.b", "openfaas-fn"}, "a.b.openfaas-fn"},
		{"a.b.openfaas-fn", "", Key{"a.b", "openfaas-fn"}, "a.b.openfaas-fn"},
		{"a.b", "b", Key{"a.b", "b"}, "a.b.b"},
		{"a.b.c", "", Key{"a.b", "c"}, "a.b.c"},
		{"a.", "", Key{"a", ""}, "a."},
		{".b", "", Key{"", "b"}, ".b"},
	} {
		got := Named(tc.text, tc.namespace)
		if got != tc.want {
			t.Errorf("Named(%q, %q) = %#v, want %#v", tc.text, tc.namespace, got, tc.want)
		}
		if tc.text != "a." && (got.Short() != tc.short || Named(got.Short(), "") != got) {
			t.Errorf("%#v is %q in short, want %q", got, got.Short(), tc.short)
		}
	}
	// A namespace has no dot, so this is not a.b of namespace c.
	if k := Named("a", "b.c"); k == Named("a.b", "c") {
		t.Errorf("a of b.c is %#v", k)
	}
}

func FuzzKey(f *testing.F) {
	f.Add("a.b", "ns")
	f.Add("", "")
	f.Add("a..", "x")
	f.Fuzz(func(t *testing.T, name, namespace string) {
		if strings.Contains(namespace, ".") {
			return
		}
		if k := (Key{name, namespace}); ParseKey(k.String()) != k {
			t.Errorf("%#v is %q, which is %#v", k, k.String(), ParseKey(k.String()))
		}
	})
}
