package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/tunnel"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/secret"
)

// sentSecrets is what a control plane sends over a stream of kind wantSecrets. The answer is a line
// as to a first line.
type sentSecrets struct {
	Function string            `json:"function"` // its key
	Values   map[string][]byte `json:"values"`   // by the secret's name
}

// maxSent bounds the secrets of a function in bytes of JSON.
const maxSent = 64 << 20

// secretFolders says where the secrets of a node are.
type secretFolders struct {
	values, mounts string
	groups         secret.Groups // nil: functions run as this process's user
}

// nodeSecrets keeps the secrets of functions of a node that shares no files with its control plane.
type nodeSecrets struct {
	store *secret.Store
	log   *slog.Logger

	mu   sync.Mutex
	held map[string]*heldSecrets // by function and set
}

// heldSecrets is what one function sees.
type heldSecrets struct {
	key    pipeline.Key
	names  []string
	folder string
	group  int
	sum    [sha256.Size]byte // of what was sent
	at     time.Time
}

func openNodeSecrets(at secretFolders, log *slog.Logger) (*nodeSecrets, error) {
	store, err := secret.OpenKept(at.values, at.mounts, at.groups)
	if err != nil {
		return nil, err
	}
	return &nodeSecrets{store: store, log: log, held: map[string]*heldSecrets{}}, nil
}

// close removes what was kept if no process of the node is left.
func (n *nodeSecrets) close(all bool) {
	if all {
		for _, function := range n.functions() {
			n.forget(function)
		}
	}
	_ = n.store.Close() // its files stay
}

// serve takes the secrets that a control plane sends.
func (n *nodeSecrets) serve(c net.Conn) {
	_ = c.SetDeadline(time.Now().Add(streamTime))
	if tunnel.Accept(c) != nil {
		return
	}
	b, err := io.ReadAll(io.LimitReader(c, maxSent+1))
	if err == nil && len(b) > maxSent {
		err = fmt.Errorf("more than %d bytes", maxSent)
	}
	if err == nil {
		err = n.take(b)
	}
	if err != nil {
		n.log.Error("secrets of a function were not taken", "error", err)
		_ = tunnel.Refuse(c, err)
		return
	}
	_ = tunnel.Accept(c)
}

// take stores secrets, and makes or updates the function's folder.
func (n *nodeSecrets) take(b []byte) error {
	var sent sentSecrets
	if err := json.Unmarshal(b, &sent); err != nil {
		return fmt.Errorf("secrets: %w", err)
	}
	key, names := pipeline.ParseKey(sent.Function), slices.Sorted(maps.Keys(sent.Values))
	if len(names) == 0 {
		return fmt.Errorf("secrets of %q: there are none", sent.Function)
	}
	h := &heldSecrets{key: key, names: names, folder: n.store.MountPath(key.Namespace, key.Name, names), sum: sha256.Sum256(b), at: time.Now()}
	at := heldKey(sent.Function, filepath.Base(h.folder))
	n.mu.Lock()
	defer n.mu.Unlock()
	if old := n.held[at]; old != nil && old.sum == h.sum && there(h.folder) {
		return nil
	}
	for _, name := range names {
		if err := n.store.Put(key.Namespace, name, sent.Values[name]); err != nil {
			return err
		}
	}
	var err error
	if h.group, err = n.store.Group(key.Namespace, names); err == nil {
		err = n.store.Mount(key.Namespace, key.Name, names)
	}
	if err == nil {
		n.held[at] = h
	}
	return err
}

func heldKey(function, set string) string { return function + " " + set }

func there(folder string) bool {
	_, err := os.Stat(folder)
	return err == nil
}

// of returns the folder of a function's secrets, and the group that may read it.
func (n *nodeSecrets) of(function, set string) (folder string, group int, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	h := n.held[heldKey(function, set)]
	if h == nil {
		return "", 0, fmt.Errorf("the secrets of %q have not come", function)
	}
	return h.folder, h.group, nil
}

// functions returns the functions that have folders, sorted.
func (n *nodeSecrets) functions() []string {
	all, err := n.store.Mounted()
	if err != nil {
		n.log.Warn("folders of secrets cannot be listed", "error", err)
	}
	var out []string
	for namespace, names := range all {
		for _, name := range names {
			out = append(out, pipeline.Key{Name: name, Namespace: namespace}.String())
		}
	}
	slices.Sort(out)
	return out
}

// forget removes the secrets of a function that is not deployed any more.
func (n *nodeSecrets) forget(function string) {
	key := pipeline.ParseKey(function)
	n.mu.Lock()
	defer n.mu.Unlock()
	err := n.store.Unmount(key.Namespace, key.Name)
	used := map[string]bool{}
	for at, h := range n.held {
		if h.key == key {
			delete(n.held, at)
		} else if h.key.Namespace == key.Namespace {
			for _, name := range h.names {
				used[name] = true
			}
		}
	}
	names, listed := n.store.List(key.Namespace)
	err = errors.Join(err, listed)
	for _, name := range names {
		if !used[name] {
			err = errors.Join(err, n.store.Delete(key.Namespace, name))
		}
	}
	if err != nil {
		n.log.Warn("secrets of a removed function are left", "function", function, "error", err)
	}
}

// sweep removes folders of earlier deploys that no process uses, until ctx ends.
func (n *nodeSecrets) sweep(ctx context.Context, inventory func() keysmanager.Inventory) {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		inv := inventory()
		if err := n.store.Sweep(func(namespace, function, folder string) bool { return n.used(namespace, function, folder, inv) }); err != nil {
			n.log.Warn("unused secrets are not removed", "error", err)
		}
	}
}

// used reports whether a folder is the latest of its function, or may be in use by a process that
// is older than the latest one.
func (n *nodeSecrets) used(namespace, function, folder string, inv keysmanager.Inventory) bool {
	key := pipeline.Key{Name: function, Namespace: namespace}
	n.mu.Lock()
	defer n.mu.Unlock()
	var latest heldSecrets
	for _, h := range n.held {
		if h.key == key && h.at.After(latest.at) {
			latest = *h
		}
	}
	if latest.folder == folder {
		return true
	}
	old := func(r keysmanager.ReplicaInfo) bool {
		return r.Function == key.String() && (latest.at.IsZero() || r.Started.Before(latest.at.Add(time.Minute)))
	}
	zygote := func(z keysmanager.ZygoteInfo) bool { return z.Function == key.String() }
	return slices.ContainsFunc(inv.Replicas, old) || slices.ContainsFunc(inv.Zygotes, zygote)
}

// readSecrets returns the secrets in a function's folder, as they are sent.
func readSecrets(function, folder string) ([]byte, error) {
	entries, err := os.ReadDir(folder)
	if err != nil {
		return nil, fmt.Errorf("secrets of %q: %w", function, err)
	}
	sent := sentSecrets{Function: function, Values: map[string][]byte{}}
	for _, e := range entries {
		if e.Name() == ".new" { // half-written
			continue
		}
		if sent.Values[e.Name()], err = os.ReadFile(filepath.Join(folder, e.Name())); err != nil {
			return nil, fmt.Errorf("secrets of %q: %w", function, err)
		}
	}
	b, err := json.Marshal(sent)
	return bytes.TrimSpace(b), err
}
