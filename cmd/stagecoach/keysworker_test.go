package main

import (
	"encoding/json"
	"os"
	"reflect"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
)

// TestSpecTravelsWhole gives each field of a spec a value and finds it on the other side.
func TestSpecTravelsWhole(t *testing.T) {
	var want keysmanager.Spec
	v := reflect.ValueOf(&want).Elem()
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
	got, err := specOf(b)
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%s becomes %+v, %v, want %+v", b, got, err, want)
	}
}

// TestSpecRefused checks what a daemon does not take for a spec.
func TestSpecRefused(t *testing.T) {
	for name, tc := range map[string]struct{ spec, want string }{
		"of another release": {`{"function":"f.ns","namespace":"ns","image":"i","colour":1}`, `unknown field "colour"; run the same release`},
		"without an image":   {`{"function":"f.ns","namespace":"ns"}`, `image ""`},
		"of another kind":    {`{"function":7}`, "cannot unmarshal number"},
		"none":               {``, "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := specOf(json.RawMessage(tc.spec)); err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("%v, want %q", err, tc.want)
			}
		})
	}
}

// TestToken: it is made once, and its owner's alone whatever somebody has made of the file.
func TestToken(t *testing.T) {
	c := defaultConfig()
	c.State, c.NATS.Listen = t.TempDir(), "127.0.0.1:0"
	u := &up{cfg: c}
	first, err := u.natsToken()
	if err != nil || len(first) < 20 {
		t.Fatalf("token %q, %v", first, err)
	}
	if err := os.Chmod(u.tokenFile(), 0o644); err != nil {
		t.Fatal(err)
	}
	second, err := u.natsToken()
	if err != nil || second != first {
		t.Errorf("token %q, %v, want the same again, %q", second, err, first)
	}
	if info, err := os.Stat(u.tokenFile()); err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v, want 0600", info.Mode(), err)
	}
	if err := os.WriteFile(u.tokenFile(), []byte("\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := u.natsToken(); err == nil || !strings.Contains(err.Error(), u.tokenFile()+" is empty") {
		t.Errorf("an empty file: %v", err)
	}
}

// TestKeysManagerFlags checks what the command refuses before it starts anything.
func TestKeysManagerFlags(t *testing.T) {
	for flags, want := range map[string]string{
		"--node a/b":            `--node: "a/b", want a name without spaces and slashes`,
		"--memory 1Mi":          "--memory: 1048576, want at least 64Mi",
		"--memory much":         `"much", want a number of bytes`,
		"--cpus 100000":         "--cpus: 100000, want 1 to",
		"--drain -1s":           "--drain: -1s, want 0 or more",
		"--ort /nowhere":        "--ort: stat /nowhere",
		"--log-format xml":      `--log-format: "xml", want text or json`,
		"--nats-token /nowhere": "", // found out later
	} {
		_, err := readKeysManagerConfig(strings.Fields(flags))
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%s: %v, want %q", flags, err, want)
		}
	}
}
