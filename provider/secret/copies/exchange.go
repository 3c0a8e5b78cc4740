package copies

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
	"github.com/stagecoach-serving/stagecoach/provider/secret"
)

// headVersion is the header with the version of a value.
const headVersion = "Stagecoach-Version"

// path is that of all requests between control planes.
const path = "/v1/secret"

// Handler answers the other control planes. Its connections must be from control planes alone.
func (c *Copies) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+path, c.serveGet)
	mux.HandleFunc("PUT "+path, c.servePut)
	return mux
}

func keyOf(r *http.Request) string {
	q := r.URL.Query()
	return q.Get("namespace") + "/" + q.Get("name")
}

func (c *Copies) serveGet(w http.ResponseWriter, r *http.Request) {
	key := keyOf(r)
	c.changing.Lock()
	value, err := c.cfg.Store.Read(split(key))
	c.mu.Lock()
	is, there := c.held[key]
	c.mu.Unlock()
	c.changing.Unlock()
	if err == nil && !there {
		err = fs.ErrNotExist
	}
	if err != nil {
		status := http.StatusInternalServerError
		if errors.Is(err, fs.ErrNotExist) {
			status, err = http.StatusNotFound, errors.New("it lacks the secret, too")
		}
		http.Error(w, err.Error(), status)
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set(headVersion, strconv.FormatUint(is.version, 10))
	_, _ = w.Write(value) // the client may have gone
}

// servePut takes a value of the leader, before it is listed.
func (c *Copies) servePut(w http.ResponseWriter, r *http.Request) {
	key := keyOf(r)
	version, err := strconv.ParseUint(r.Header.Get(headVersion), 10, 64)
	if err != nil {
		http.Error(w, "version: "+err.Error(), http.StatusBadRequest)
		return
	}
	value, err := io.ReadAll(http.MaxBytesReader(w, r.Body, secret.MaxSize))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	// If this process changes the secret, too, one of the two changes is listed first.
	unlock, err := c.order.Lock(r.Context(), key)
	if err != nil {
		http.Error(w, "a change of this control plane is still running: "+err.Error(), http.StatusConflict)
		return
	}
	defer unlock()
	c.mu.Lock()
	listed := c.listed[key].Version
	c.mu.Unlock()
	if version <= listed {
		http.Error(w, fmt.Sprintf("version %d, and the list has version %d: another control plane leads now", version, listed), http.StatusConflict)
		return
	}
	// A later version that this process has may be the remains of a change that was never listed.
	if _, err := c.put(key, value, func(held uint64) uint64 { return max(version, held) }); err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	c.cfg.Stored(split(key))
	w.WriteHeader(http.StatusNoContent)
}

// exchange sends requests to other control planes.
type exchange struct {
	peers func() []Peer
	dial  func(ctx context.Context, p Peer) (net.Conn, error)
	log   *slog.Logger
	wait  time.Duration // for a peer
}

// client returns a client for one request to a peer.
func (x exchange) client(p Peer) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext:       func(ctx context.Context, _, _ string) (net.Conn, error) { return x.dial(ctx, p) },
		DisableKeepAlives: true, DisableCompression: true,
	}}
}

func (x exchange) do(ctx context.Context, p Peer, method, key string, version uint64, value []byte) ([]byte, uint64, error) {
	namespace, name := split(key)
	q, err := http.NewRequestWithContext(ctx, method, "http://peer"+path+"?"+url.Values{"namespace": {namespace}, "name": {name}}.Encode(), bytes.NewReader(value))
	if err != nil {
		return nil, 0, err
	}
	q.Header.Set(headVersion, strconv.FormatUint(version, 10))
	resp, err := x.client(p).Do(q)
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, secret.MaxSize+1))
	switch {
	case err != nil:
		return nil, 0, err
	case resp.StatusCode >= http.StatusBadRequest:
		return nil, 0, fmt.Errorf("status %d: %.300s", resp.StatusCode, bytes.TrimSpace(b))
	case len(b) > secret.MaxSize:
		return nil, 0, fmt.Errorf("a value of more than %d bytes", secret.MaxSize)
	}
	// The version is 0 for a value from before there was a list.
	got, _ := strconv.ParseUint(resp.Header.Get(headVersion), 10, 64)
	return b, got, nil
}

// ask asks a peer for a value.
func (x exchange) ask(ctx context.Context, p Peer, key string) ([]byte, uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, x.wait)
	defer cancel()
	return x.do(ctx, p, http.MethodGet, key, 0, nil)
}

// push sends a value to all peers at once. It returns how many of them have taken it, and how
// many peers there are.
func (x exchange) push(ctx context.Context, key string, value []byte, version uint64) (have, alive int) {
	ctx, cancel := context.WithTimeout(ctx, x.wait)
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	peers := x.peers()
	for _, p := range peers {
		wg.Go(func() {
			_, _, err := x.do(ctx, p, http.MethodPut, key, version, value)
			if err != nil {
				x.log.Warn("a secret has not reached another control plane, which asks for it later", "secret", key, "control plane", p.Name, "error", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			have++
		})
	}
	wg.Wait()
	return have, len(peers)
}

// versionsFile is the form of the file with versions.
type versionsFile struct {
	V        int               `json:"v"` // 1
	Versions map[string]uint64 `json:"versions"`
}

func readVersions(file string) (map[string]uint64, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var is versionsFile
	if err := json.Unmarshal(b, &is); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if is.V != 1 {
		return nil, fmt.Errorf("%s has version %d, want 1: a newer stagecoach has written it", file, is.V)
	}
	return is.Versions, nil
}

// writeVersions writes the file completely or not at all.
func writeVersions(file string, versions map[string]uint64) error {
	b, err := json.Marshal(versionsFile{1, versions})
	if err != nil {
		return err
	}
	return disk.Replace(file, b)
}
