package node

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

var validOrder = Order{V: Version, ID: "A1", To: "B2", Kind: OrderStart, Within: time.Second, Replica: "r-1", Spec: Spec{Function: "f.ns", Namespace: "ns", Image: "i"}}

// TestDecodeOrderRefusesWithACause checks which orders are refused, and that the error says why.
func TestDecodeOrderRefusesWithACause(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(map[string]any)
		want   string // in the error; empty: none
	}{
		"valid":          {func(map[string]any) {}, ""},
		"other version":  {func(m map[string]any) { m["v"] = 2 }, "version 2, want 1: run the same release"},
		"no version":     {func(m map[string]any) { delete(m, "v") }, "version 0, want 1"},
		"unknown field":  {func(m map[string]any) { m["gpu"] = 1 }, `unknown field "gpu"`},
		"unknown kind":   {func(m map[string]any) { m["kind"] = "dance" }, `kind: "dance" is unknown`},
		"no id":          {func(m map[string]any) { m["id"] = "" }, `id: ""`},
		"id of a path":   {func(m map[string]any) { m["id"] = "a.b" }, `id: "a.b", want letters and digits`},
		"no addressee":   {func(m map[string]any) { delete(m, "to") }, `to: ""`},
		"no time":        {func(m map[string]any) { delete(m, "within") }, "within: 0s"},
		"too much time":  {func(m map[string]any) { m["within"] = 48 * time.Hour }, "within: 48h0m0s, want more than 0 and at most 1h0m0s"},
		"no replica":     {func(m map[string]any) { delete(m, "replica") }, `replica: ""`},
		"replica path":   {func(m map[string]any) { m["replica"] = "../r" }, `replica: "../r", want a name without spaces and slashes`},
		"no spec":        {func(m map[string]any) { delete(m, "spec") }, `spec: function "", namespace "", image "", want all of them`},
		"no image":       {func(m map[string]any) { delete(m["spec"].(map[string]any), "image") }, `spec: function "f.ns", namespace "ns", image "", want all of them`},
		"another spec":   {func(m map[string]any) { m["spec"].(map[string]any)["colour"] = 1 }, `unknown field "colour"; run the same release of stagecoach everywhere`},
		"wrong spec":     {func(m map[string]any) { m["spec"] = map[string]any{"function": 7} }, "cannot unmarshal number"},
		"load nothing":   {func(m map[string]any) { m["kind"] = OrderLoad; delete(m, "spec") }, `spec: function ""`},
		"warm nothing":   {func(m map[string]any) { m["kind"], m["wanted"] = OrderWarm, []Wanted{{}} }, `spec: function ""`},
		"negative cpu":   {func(m map[string]any) { m["cpuMilli"] = -1 }, "cpuMilli: -1"},
		"stop nothing":   {func(m map[string]any) { m["kind"], m["replica"] = OrderStop, "" }, "replica"},
		"cancel nothing": {func(m map[string]any) { m["kind"] = OrderCancel }, "target"},
		"who":            {func(m map[string]any) { m["kind"] = OrderWho; delete(m, "to") }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			b, err := json.Marshal(validOrder)
			if err != nil {
				t.Fatal(err)
			}
			var m map[string]any
			if err := json.Unmarshal(b, &m); err != nil {
				t.Fatal(err)
			}
			tc.change(m)
			if b, err = json.Marshal(m); err != nil {
				t.Fatal(err)
			}
			o, err := DecodeOrder(b)
			if tc.want == "" && err != nil || tc.want != "" && (err == nil || !strings.Contains(err.Error(), tc.want)) {
				t.Errorf("%s: %v, want %q", b, err, tc.want)
			}
			if name == "valid" && !reflect.DeepEqual(o, validOrder) {
				t.Errorf("got %+v, want %+v", o, validOrder)
			}
		})
	}
}

// TestInventoryIgnoresUnknownFields checks that unknown fields are ignored.
func TestInventoryIgnoresUnknownFields(t *testing.T) {
	inv, err := DecodeInventory([]byte(`{"v":1,"name":"n1","id":"A","colour":"red","memory":{"total":5}}`))
	if err != nil || inv.Memory.Total != 5 {
		t.Errorf("%+v, %v", inv, err)
	}
	if _, err := DecodeInventory([]byte(`{"v":3,"name":"n1","id":"A"}`)); err == nil || !strings.Contains(err.Error(), "version 3") {
		t.Errorf("version 3: %v", err)
	}
}

// FuzzDecode checks that decoding does not panic. An accepted message must stay the same when it is
// encoded and decoded again.
func FuzzDecode(f *testing.F) {
	for _, v := range []any{
		validOrder,
		Order{V: 1, ID: "A", Kind: OrderWho, Within: 1},
		Inventory{V: 1, Identity: Identity{Name: "n", ID: "A"}},
		Answer{V: 1, ID: "A", Done: true, Phases: []Phase{{"load", 1}}},
		Event{V: 1, ID: "A", Number: 1, Kind: EventExit},
		socketRequest{V: 1, Want: wantSocket, Replica: "r", Order: "A"},
		socketReply{V: 1, Error: "no"},
		Line{Text: "x", Lost: 3},
	} {
		b, err := json.Marshal(v)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte(`{"v":1e0,"id":"a","kind":"who","within":1e1}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		again(t, b, DecodeOrder)
		again(t, b, DecodeInventory)
		again(t, b, DecodeAnswer)
		again(t, b, DecodeEvent)
		again(t, b, decodeRequest)
		again(t, b, decodeLine)
		_ = readReply(b)
	})
}

func again[T any](t *testing.T, b []byte, decode func([]byte) (T, error)) {
	v, err := decode(b)
	if err != nil {
		return
	}
	c, err := json.Marshal(v)
	if err != nil {
		return // a time that JSON has no form for
	}
	w, err := decode(c)
	d, _ := json.Marshal(w)
	if err != nil || string(c) != string(d) {
		t.Fatalf("%s becomes %s and then %s, %v", b, c, d, err)
	}
}

// TestBadSocketRequestsAreAnswered sends unknown requests and an unknown version to a daemon's
// socket.
func TestBadSocketRequestsAreAnswered(t *testing.T) {
	me, err := Identify("n1", "test")
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewServer(ServerConfig{Me: me, Socket: filepath.Join(t.TempDir(), "run", "s"), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for request, want := range map[string]string{
		`{"v":1,"want":"socket","replica":"r","order":"A"}`: `no socket of replica "r" waits for order A`,
		`{"v":1,"want":"money"}`:                            `want: "money"`,
		`{"v":2,"want":"socket"}`:                           "version 2, want 1",
		`hello`:                                             "want a JSON object",
		strings.Repeat("x", maxRequest+1):                   "want a line of at most",
	} {
		c, err := net.Dial("unix", s.socket.path)
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		fmt.Fprintln(c, request)
		line, err := bufio.NewReader(c).ReadString('\n')
		if err != nil || !strings.Contains(line, "error") || readReply([]byte(line)) == nil || !strings.Contains(readReply([]byte(line)).Error(), want) {
			t.Errorf("%.60s: answered %q, %v, want %q", request, line, err, want)
		}
		_ = c.Close()
	}
}

// TestASocketIsHandedOverOnce claims a socket twice. The second claim must fail.
func TestASocketIsHandedOverOnce(t *testing.T) {
	me, err := Identify("n1", "test")
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewServer(ServerConfig{Me: me, Socket: filepath.Join(t.TempDir(), "run", "s"), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	far := os.NewFile(uintptr(fds[1]), "far")
	defer far.Close()
	f := os.NewFile(uintptr(fds[0]), "near")
	near, err := net.FileConn(f)
	_ = f.Close()
	if err != nil {
		t.Fatal(err)
	}
	s.kept["r-1"] = &kept{order: "A", replica: "r-1", conn: wire.NewSocket(near.(*net.UnixConn)), timer: time.AfterFunc(time.Hour, func() {})}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := claim(ctx, s.socket.path, Order{Replica: "r-1", ID: "B"}); err == nil {
		t.Error("claimed for an order that did not start it")
	}
	got, err := claim(ctx, s.socket.path, Order{Replica: "r-1", ID: "A"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := claim(ctx, s.socket.path, Order{Replica: "r-1", ID: "A"}); err == nil || !strings.Contains(err.Error(), "it was handed out") {
		t.Errorf("claimed again: %v", err)
	}
	_ = got.Close()
	_ = far.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := far.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("after the only claimant has closed: %v, want the end: the daemon holds it too", err)
	}
}
