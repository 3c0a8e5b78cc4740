package warden

import (
	"encoding/json"
	"net"
	"os"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// fill sets each field of a value to something other than its zero value.
func fill(t *testing.T, v reflect.Value, f *os.File) {
	t.Helper()
	switch v.Kind() {
	case reflect.String:
		v.SetString("text")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64, reflect.Int32:
		v.SetInt(7)
	case reflect.Uint, reflect.Uint64, reflect.Uint32:
		v.SetUint(7)
	case reflect.Pointer:
		if v.Type() == fileType {
			v.Set(reflect.ValueOf(f))
			return
		}
		v.Set(reflect.New(v.Type().Elem()))
		fill(t, v.Elem(), f)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(t, v.Index(i), f)
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		value := reflect.New(v.Type().Elem()).Elem()
		fill(t, value, f)
		key := reflect.New(v.Type().Key()).Elem()
		fill(t, key, f)
		v.SetMapIndex(key, value)
	case reflect.Struct:
		for i := range v.NumField() {
			if !v.Type().Field(i).IsExported() {
				t.Fatalf("field %s of %s is not exported: it would not reach the warden", v.Type().Field(i).Name, v.Type())
			}
			fill(t, v.Field(i), f)
		}
	default:
		t.Fatalf("a %s in a command: teach this test", v.Type())
	}
}

// TestCommandsSurviveTheWire sends a command with all fields through JSON and compares each field.
func TestCommandsSurviveTheWire(t *testing.T) {
	var c sandbox.Command
	fill(t, reflect.ValueOf(&c).Elem(), os.Stdin)
	c.Files = []*os.File{os.Stdin, nil, os.Stdout}
	m := message{Op: opStart}
	m.setCommand(c)
	m.files = append(m.files, os.Stderr)
	m.Keep = 1
	b, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var got message
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	got.files = m.files
	back, err := got.command()
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(back, c) {
		t.Errorf("a command\n%+v comes out as\n%+v", c, back)
	}
	if kept, err := got.kept(); err != nil || len(kept) != 1 || kept[0] != os.Stderr {
		t.Errorf("kept %v, %v", kept, err)
	}
	if c.Stdin == nil || len(c.Files) != 3 {
		t.Error("the command that was sent was changed")
	}
}

func TestInvalidCommandsAreRefused(t *testing.T) {
	for text, want := range map[string]string{
		`{}`:                                          "no command",
		`{"command":{},"fields":{"Stdin":[1]}}`:       "descriptor 1, want one of 1",
		`{"command":{},"fields":{"Stdin":[-2]}}`:      "descriptor -2",
		`{"command":{},"fields":{"Stdin":[0,0]}}`:     "2 descriptors",
		`{"command":{},"fields":{"Dir":[0]}}`:         "command.Dir",
		`{"command":{},"fields":{"Nosuch":[0]}}`:      "command.Nosuch: 1 descriptors, want a field for them",
		`{"command":{},"fields":{"Files":[0,-1,99]}}`: "descriptor 99",
	} {
		var m message
		if err := json.Unmarshal([]byte(text), &m); err != nil {
			t.Fatal(err)
		}
		m.files = []*os.File{os.Stdin}
		if _, err := m.command(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
	for _, keep := range []int{-1, 2} {
		m := message{Keep: keep, files: []*os.File{os.Stdin}}
		if _, err := m.kept(); err == nil {
			t.Errorf("%d of 1 descriptors are kept", keep)
		}
	}
}

// FuzzMessage checks that any message is refused or carried out, and that its descriptors are
// closed.
func FuzzMessage(f *testing.F) {
	f.Add([]byte(`{"version":1,"op":"start","id":1,"name":"a","command":{"Argv":["x"]},"fields":{"Stdin":[0]},"keep":1}`), 2)
	f.Add([]byte(`{"version":1,"op":"kept","fields":{"Files":[0,1,-1]}}`), 3)
	f.Add([]byte(`{"version":99}`), 0)
	f.Add([]byte("{"), 1)
	f.Fuzz(func(t *testing.T, b []byte, files int) {
		if len(b) == 0 || len(b) > maxMessage {
			return
		}
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		ours, theirs := pairOf(t, pair)
		defer ours.conn.Close()
		defer theirs.conn.Close()
		var all []*os.File
		for range min(max(files, 0), 8) {
			all = append(all, os.Stdin)
		}
		if err := ours.write(b, all, nil); err != nil {
			t.Fatal(err)
		}
		m, err := theirs.receive()
		if err != nil {
			return
		}
		defer m.close()
		if len(m.files) != len(all) {
			t.Fatalf("%d descriptors came, want %d", len(m.files), len(all))
		}
		if c, err := m.command(); err == nil {
			var again message
			again.setCommand(c)
			if back, err := again.command(); err != nil || !reflect.DeepEqual(back, c) {
				t.Errorf("%+v comes out as %+v, %v", c, back, err)
			}
		}
		_, _ = m.kept()
	})
}

func pairOf(t *testing.T, fds [2]int) (a, b *wire) {
	t.Helper()
	var out [2]*wire
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		_ = f.Close()
		if err != nil {
			t.Fatal(err)
		}
		out[i] = newWire(c.(*net.UnixConn))
	}
	return out[0], out[1]
}
