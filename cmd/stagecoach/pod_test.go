package main

import (
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// TestMakeWritable makes folders writable that are mounted read-only, with a mount below one of
// them, as in a container.
func TestMakeWritable(t *testing.T) {
	needRoot(t)
	folder := t.TempDir()
	below := filepath.Join(folder, "below")
	if err := os.Mkdir(below, 0o700); err != nil {
		t.Fatal(err)
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with its mount namespace
		done <- func() error {
			err := errors.Join(unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
			for _, at := range []string{folder, below} {
				err = errors.Join(err, unix.Mount(at, at, "", unix.MS_BIND, ""), unix.Mount("", at, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
			}
			if err != nil {
				return err
			}
			write := func(at string) error { return os.WriteFile(filepath.Join(at, "file"), nil, 0o600) }
			if err := write(below); !errors.Is(err, unix.EROFS) {
				return fmt.Errorf("the folder is not read-only at first: %w", err)
			}
			return errors.Join(makeWritable([]string{folder, t.TempDir()}), write(folder), write(below))
		}()
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if err := makeWritable([]string{filepath.Join(folder, "none")}); err == nil || !strings.Contains(err.Error(), "CAP_SYS_ADMIN") {
		t.Errorf("a folder that cannot be made writable: %v, want an error that says what is missing", err)
	}
}

// TestPodNodeName keeps the name of a node with its state, and gives another name to a machine with
// an empty disk.
func TestPodNodeName(t *testing.T) {
	state := filepath.Join(t.TempDir(), "node")
	name := func(state string) string {
		t.Helper()
		got, err := podNodeName("worker-1", state)
		if err != nil || len(got) != len("worker-1-abcde") || !strings.HasPrefix(got, "worker-1-") {
			t.Fatalf("name %q, %v, want worker-1 and five characters", got, err)
		}
		return got
	}
	first := name(state)
	if again := name(state); again != first {
		t.Errorf("name %q after a restart, want %q", again, first)
	}
	if other := name(t.TempDir()); other == first {
		t.Errorf("name %q of a machine with an empty disk, want another one", other)
	}
	if err := os.WriteFile(filepath.Join(state, suffixFile), []byte("a b/c"), 0o600); err != nil {
		t.Fatal(err)
	}
	name(state)
}

// TestJoinSecret keeps a join token in a Secret: it writes one, leaves one that is good, and writes
// a new one if someone has changed it.
func TestJoinSecret(t *testing.T) {
	data, patches := map[string][]byte{}, 0
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var patch struct{ Data map[string][]byte }
		if r.Method == http.MethodPatch && json.NewDecoder(r.Body).Decode(&patch) == nil {
			patches++
			maps.Copy(data, patch.Data)
		}
		_ = json.NewEncoder(w).Encode(map[string]any{"data": data})
	}))
	defer s.Close()
	account := t.TempDir()
	for name, b := range map[string][]byte{"token": []byte("t"), "ca.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})} {
		if err := os.WriteFile(filepath.Join(account, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	client, err1 := kube.New(s.URL, account)
	keys, err2 := queue.NewKeys()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	a, err3 := authority.Open(authority.Config{Dir: t.TempDir(), Name: "up", Now: time.Now, Users: keys, Log: log})
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	j := &joinSecret{secret: kube.Secret{Namespace: "ns", Name: "join"}, client: client, authority: a, log: log}
	keep := func(want int) string {
		t.Helper()
		if err := j.keep(t.Context()); err != nil || patches != want {
			t.Fatalf("the Secret was written %d times, %v, want %d", patches, err, want)
		}
		token, err := identity.ParseToken(string(data[joinKey]))
		if err != nil || len(a.Tokens()) != 1 || a.Tokens()[0].ID != token.ID() {
			t.Errorf("the Secret has %q, %v, want the only token of %v", data[joinKey], err, a.Tokens())
		}
		return string(data[joinKey])
	}
	first := keep(1)
	keep(1)
	data[joinKey] = []byte("edited")
	if keep(2) == first {
		t.Error("the Secret has the earlier token, which someone may have read")
	}
}
