package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// TestNodeSecrets checks what a node keeps of the secrets that it gets: a folder per function and
// set, the present values, and nothing of functions that it has forgotten.
func TestNodeSecrets(t *testing.T) {
	dir := t.TempDir()
	open := func() *nodeSecrets {
		t.Helper()
		n, err := openNodeSecrets(secretFolders{values: dir, mounts: filepath.Join(dir, "secret-mounts")}, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	n := open()
	take := func(sent string) {
		t.Helper()
		if err := n.take([]byte(sent)); err != nil {
			t.Fatalf("%s: %v", sent, err)
		}
	}
	read := func(file string) string {
		b, _ := os.ReadFile(file) // "": it is not there
		return string(b)
	}
	take(`{"function": "f.ns", "values": {"key": "b25l", "cert": "Yw=="}}`)
	take(`{"function": "g.ns", "values": {"key": "b25l"}}`)
	set := func(function string, names ...string) string {
		key := pipeline.ParseKey(function)
		return n.store.MountPath(key.Namespace, key.Name, names)
	}
	folder, _, err := n.of("f.ns", filepath.Base(set("f.ns", "key", "cert")))
	if err != nil || read(folder+"/key") != "one" || read(folder+"/cert") != "c" {
		t.Errorf("folder %s (%v) has key %q and cert %q", folder, err, read(folder+"/key"), read(folder+"/cert"))
	}
	take(`{"function": "g.ns", "values": {"key": "dHdv"}}`)
	if got := read(folder + "/key"); got != "two" {
		t.Errorf("f reads key %q after it has changed, want two", got)
	}
	if _, _, err := n.of("f.ns", "another"); err == nil || !strings.Contains(err.Error(), `the secrets of "f.ns" have not come`) {
		t.Errorf("another set: %v", err)
	}
	take(`{"function": "f.ns", "values": {"cert": "Yw=="}}`)
	var inv keysmanager.Inventory
	if later := set("f.ns", "cert"); !n.used("ns", "f", later, inv) || n.used("ns", "f", folder, inv) {
		t.Error("without replicas, only the folder of the latest deploy is in use")
	}
	inv.Replicas = []keysmanager.ReplicaInfo{{Function: "f.ns", Started: time.Now().Add(-time.Hour)}}
	if !n.used("ns", "f", folder, inv) {
		t.Error("a replica of an earlier deploy may use its folder")
	}
	for _, bad := range []string{`{`, `{"function": "f.ns"}`, `{"function": "../x.ns", "values": {"key": ""}}`, `{"function": "f.ns", "values": {"../key": ""}}`} {
		if n.take([]byte(bad)) == nil {
			t.Errorf("%s is taken", bad)
		}
	}
	n.close(false)
	n = open() // as after kill -9
	if got := n.functions(); !slices.Equal(got, []string{"f.ns", "g.ns"}) {
		t.Errorf("functions with secrets: %q", got)
	}
	take(`{"function": "g.ns", "values": {"key": "dHdv"}}`)
	n.forget("f.ns")
	if _, err := os.Stat(folder); !os.IsNotExist(err) || read(dir+"/secrets/ns/cert") != "" || read(dir+"/secrets/ns/key") != "two" {
		t.Errorf("forgotten: folder %v, cert %q, key %q", err, read(dir+"/secrets/ns/cert"), read(dir+"/secrets/ns/key"))
	}
	n.close(true)
	if got := read(dir + "/secrets/ns/key"); got != "" {
		t.Errorf("a stopped node keeps %q", got)
	}
}
