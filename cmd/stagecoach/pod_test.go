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
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
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
	below, beside := filepath.Join(folder, "below"), t.TempDir()
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
			part := filepath.Join(beside, "part")
			err = errors.Join(os.Mkdir(part, 0o700), unix.Mount(beside, beside, "", unix.MS_BIND, ""), unix.Mount("", beside, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
			if err != nil {
				return err
			}
			write := func(at string) error { return os.WriteFile(filepath.Join(at, "file"), nil, 0o600) }
			if err := write(below); !errors.Is(err, unix.EROFS) {
				return fmt.Errorf("the folder is not read-only at first: %w", err)
			}
			if err := errors.Join(makeWritable(folder), makeWritable(t.TempDir()), write(folder), write(below), makePartWritable(part), write(part)); err != nil {
				return err
			}
			if err := write(beside); !errors.Is(err, unix.EROFS) {
				return fmt.Errorf("a folder is not read-only any more, of which only a part is to be writable: %w", err)
			}
			return nil
		}()
	}()
	if err := <-done; err != nil {
		t.Error(err)
	}
	none := filepath.Join(folder, "none")
	if err := errors.Join(makeWritable(none), makePartWritable(none)); err == nil || !strings.Contains(err.Error(), "CAP_SYS_ADMIN") {
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

// secretAPI is an API server with one Secret.
type secretAPI struct {
	data    map[string][]byte
	patches int
	refuse  bool // patches
}

func (a *secretAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var patch struct{ Data map[string][]byte }
	if r.Method == http.MethodPatch && a.refuse {
		w.WriteHeader(http.StatusForbidden)
		_, _ = w.Write([]byte(`{"message":"secrets \"join\" is forbidden: User \"pod\" cannot patch resource \"secrets\""}`))
		return
	}
	if r.Method == http.MethodPatch && json.NewDecoder(r.Body).Decode(&patch) == nil {
		a.patches++
		maps.Copy(a.data, patch.Data)
	}
	_ = json.NewEncoder(w).Encode(map[string]any{"data": a.data})
}

// newJoinSecret keeps a token in the Secret of an API server. The clock of the authority is now.
func newJoinSecret(t *testing.T, now func() time.Time) (*secretAPI, *joinSecret) {
	t.Helper()
	api := &secretAPI{data: map[string][]byte{}}
	s := httptest.NewTLSServer(api)
	t.Cleanup(s.Close)
	account := t.TempDir()
	for name, b := range map[string][]byte{"token": []byte("t"), "ca.crt": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})} {
		if err := os.WriteFile(filepath.Join(account, name), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	client, err1 := kube.New(s.URL, account)
	keys, err2 := queue.NewKeys()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	a, err3 := authority.Open(authority.Config{Dir: t.TempDir(), Name: "up", Now: now, Users: keys, Log: log})
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	return api, &joinSecret{secret: kube.Secret{Namespace: "ns", Name: "join"}, client: client, authority: a, log: log}
}

// TestJoinSecret keeps a join token in a Secret: it writes one, leaves one that is good, and writes
// a new one if someone has changed it, or if it is a day old.
func TestJoinSecret(t *testing.T) {
	now := time.Now()
	api, j := newJoinSecret(t, func() time.Time { return now })
	keep := func(want, tokens int) string {
		t.Helper()
		if err := j.keep(t.Context()); err != nil || api.patches != want {
			t.Fatalf("the Secret was written %d times, %v, want %d", api.patches, err, want)
		}
		token, err := identity.ParseToken(string(api.data[joinKey]))
		if all := j.authority.Tokens(); err != nil || len(all) != tokens || all[0].ID != token.ID() {
			t.Errorf("the Secret has %q, %v, want the latest token of %v, which are %d", api.data[joinKey], err, all, tokens)
		}
		return string(api.data[joinKey])
	}
	first := keep(1, 1)
	keep(1, 1)
	api.data[joinKey] = []byte("edited")
	second := keep(2, 1)
	if second == first {
		t.Error("the Secret has the earlier token, which someone may have read")
	}
	now = now.Add(rotation.Every - time.Second)
	keep(2, 1)
	now = now.Add(time.Second)
	if keep(3, 2) == second {
		t.Error("the Secret has the token of yesterday")
	}
	now = now.Add(rotation.Overlap)
	keep(3, 1)
}

// TestJoinSecretIsRefused has the API server refuse to write the token. One token is made for all
// attempts, and the attempts and their errors become rare.
func TestJoinSecretIsRefused(t *testing.T) {
	api, j := newJoinSecret(t, time.Now)
	var logged strings.Builder
	j.log = slog.New(slog.NewTextHandler(&logged, nil))
	api.refuse = true
	at := time.Now()
	var waits []time.Duration
	made := map[string]bool{}
	for range 8 {
		err := j.keep(t.Context())
		if err == nil || !strings.Contains(err.Error(), "cannot patch resource") {
			t.Fatalf("a refused patch: %v", err)
		}
		for _, token := range j.authority.Tokens() {
			made[token.ID] = true
		}
		wait := j.next(err, at)
		waits, at = append(waits, wait), at.Add(wait)
	}
	if len(made) != 1 {
		t.Errorf("%d tokens were made, want one for all attempts", len(made))
	}
	if want := []time.Duration{2, 4, 8, 16, 32, 60, 60, 60}; !slices.EqualFunc(waits, want, func(a, b time.Duration) bool { return a == b*time.Second }) {
		t.Errorf("waits %v, want %v seconds", waits, want)
	}
	if n := strings.Count(logged.String(), "level=ERROR"); n != 4 {
		t.Errorf("%d errors in %v, want one per minute:\n%s", n, 242*time.Second, &logged)
	}
	api.refuse = false
	if err := j.keep(t.Context()); err != nil || j.next(err, at) != keepEvery || !strings.Contains(logged.String(), "in its Secret again") {
		t.Errorf("after the errors: %v, and the log\n%s", err, &logged)
	}
	token, err := identity.ParseToken(string(api.data[joinKey]))
	if all := j.authority.Tokens(); err != nil || len(all) != 1 || all[0].ID != token.ID() {
		t.Errorf("the Secret has %q, want the only token of %v", api.data[joinKey], all)
	}
}

// TestJoinSecretOutsideOfAPod checks that a process without credentials of a pod says so at its
// start, and not when it leads.
func TestJoinSecretOutsideOfAPod(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := openJoinSecret(ClusterConfig{JoinSecret: "a/b"}, slog.Default()); !errors.Is(err, kube.ErrNoPod) || !strings.Contains(err.Error(), "cluster.joinSecret") {
		t.Errorf("outside of a pod: %v, want ErrNoPod, and the field", err)
	}
	j, err := openJoinSecret(ClusterConfig{}, slog.Default())
	if err != nil || j != nil {
		t.Errorf("without a Secret: %v, %v, want none", j, err)
	}
	j.start(nil)()
}

// TestHealthz answers a probe while the metrics are stuck.
func TestHealthz(t *testing.T) {
	begun, stuck := make(chan struct{}), make(chan struct{})
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "stuck"}, func() float64 { close(begun); <-stuck; return 0 }))
	h := observed(metrics)
	get := func(path string) int {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, http.NoBody))
		return w.Code
	}
	read := make(chan int, 1)
	go func() { read <- get("/metrics") }()
	<-begun
	if status := get("/healthz"); status != http.StatusOK {
		t.Errorf("status %d, want 200", status)
	}
	close(stuck)
	if status := <-read; status != http.StatusOK {
		t.Errorf("status %d of the metrics, want 200", status)
	}
}
