package provider

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"strconv"
	"time"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Store keeps the deployments across restarts.
type Store interface {
	// Put stores value under key and returns its revision.
	Put(ctx context.Context, key string, value []byte) (revision uint64, err error)
	// Delete removes key. It is no error if the key does not exist.
	Delete(ctx context.Context, key string) error
	// Watch calls f with the latest value of every key, and then with every change in the order of
	// revisions. Calls come one at a time, until stop is called or ctx ends. Watch returns once f
	// has seen all values that existed before.
	Watch(ctx context.Context, f func(Entry)) (stop func(), err error)
}

// Entry is one change of a key in a [Store]. It is an alias, so that stores need not import this
// package.
type Entry = struct {
	Key      string
	Value    []byte // empty if Deleted
	Revision uint64 // grows with every change of the store
	Deleted  bool
}

// Deployed is a deployed function. It is shared, so its maps must not be changed.
type Deployed struct {
	Key pipeline.Key
	// Revision of its replicas: the store's revision of the latest change that replaced them. See
	// keepsReplicas.
	Revision uint64
	Declared pipeline.Function // parsed labels and annotations
	stored
}

// stored is the part of a [Deployed] that is stored: the deployment as the API got it, and what the
// deploy found out.
type stored struct {
	Deployment types.FunctionDeployment `json:"deployment"`
	CreatedAt  time.Time                `json:"createdAt"` // time of the first deploy
	// digest of the image at the latest deploy; empty: only the name identifies the image.
	Digest string `json:"digest,omitempty"`
	// guessed process at the latest deploy; empty: the deployment or the image names the process.
	Guess Guess `json:"guess,omitzero"`
	// Revision of the replicas, if later deploys have kept them; 0: the revision of this entry.
	Replicas uint64 `json:"replicas,omitempty"`
}

// Process returns the command that replicas run; empty: the image names it.
func (d *Deployed) Process() string { return cmp.Or(d.Deployment.EnvProcess, d.Guess.Process) }

// Environment returns a new map of the replicas' variables. A guessed server runs in mode http
// unless the deployment sets a mode.
func (d *Deployed) Environment() map[string]string {
	env := maps.Clone(d.Deployment.EnvVars)
	if env == nil {
		env = map[string]string{}
	}
	if d.Guess.HTTP && env["mode"] == "" {
		env["mode"] = "http"
	}
	return env
}

// recordVersion is the version of the stored form of a deployment.
const recordVersion = 1

// record is the stored form of a deployment.
type record struct {
	Version int `json:"version"`
	stored
}

func encode(d Deployed) ([]byte, error) {
	b, err := json.Marshal(record{recordVersion, d.stored})
	if err != nil {
		return nil, fmt.Errorf("function %q: %w", d.Key, err)
	}
	return b, nil
}

// decode decodes a stored deployment. It fails if an earlier version accepted something that this
// version refuses, except for names (see [pipeline.ParseStored]).
func decode(e Entry) (Deployed, error) {
	var r record
	if err := json.Unmarshal(e.Value, &r); err != nil {
		return Deployed{}, fmt.Errorf("stored function %q: %w", e.Key, err)
	}
	if r.Version != recordVersion {
		return Deployed{}, fmt.Errorf("stored function %q: version %d, want %d; deploy it again", e.Key, r.Version, recordVersion)
	}
	d := Deployed{Key: pipeline.ParseKey(e.Key), Revision: cmp.Or(r.Replicas, e.Revision), stored: r.stored}
	fn, err := parse(r.Deployment, pipeline.ParseStored)
	if err != nil {
		return Deployed{}, fmt.Errorf("stored function %q: %w", e.Key, err)
	}
	if got := fn.Key(); got != d.Key {
		return Deployed{}, fmt.Errorf("stored function %q: holds %q", e.Key, got)
	}
	d.Declared = fn
	return d, nil
}

// Prefixes of keys in the store. Functions' keys have no slash.
const (
	namespacePrefix = "namespace/"
	// stagePrefix begins the keys of functions that were removed while they had variants. Such a
	// record is a function's last one.
	stagePrefix = "stage/"
)

// Namespace is a declared namespace. It is shared, so its maps must not be changed.
type Namespace struct {
	Labels      map[string]string `json:"labels,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// namespaceRecord is the stored form of a namespace.
type namespaceRecord struct {
	Version int `json:"version"`
	Namespace
}

func encodeNamespace(name string, n Namespace) ([]byte, error) {
	b, err := json.Marshal(namespaceRecord{recordVersion, n})
	if err != nil {
		return nil, fmt.Errorf("namespace %q: %w", name, err)
	}
	return b, nil
}

func decodeNamespace(name string, value []byte) (Namespace, error) {
	var r namespaceRecord
	if err := json.Unmarshal(value, &r); err != nil {
		return Namespace{}, fmt.Errorf("stored namespace %q: %w", name, err)
	}
	if r.Version != recordVersion || !namespaceForm.MatchString(name) {
		return Namespace{}, fmt.Errorf("stored namespace %q: version %d, want %d and a valid name", name, r.Version, recordVersion)
	}
	return r.Namespace, nil
}

// parse reads the labels and annotations with the given parser of package pipeline.
func parse(d types.FunctionDeployment, by func(name, namespace string, labels, annotations map[string]string) (pipeline.Function, error)) (pipeline.Function, error) {
	f, err := by(d.Service, d.Namespace, deref(d.Labels), deref(d.Annotations))
	for _, e := range fieldErrors(err) {
		if e.Path == "name" {
			e.Path = "service" // the name of this field in the API
		}
	}
	return f, errors.Join(err, checkNamespace("namespace", d.Namespace))
}

// checkNamespace checks a namespace's name, which came in the field path.
func checkNamespace(path, name string) error {
	if namespaceForm.MatchString(name) {
		return nil
	}
	return &pipeline.FieldError{Path: path, Got: quote(name), Want: "up to 63 lower-case letters, digits and -, no - at the ends"}
}

// quote quotes the beginning of what a client sent.
func quote(s string) string {
	const most = 100
	if len(s) > most {
		return strconv.Quote(s[:most]) + "…"
	}
	return strconv.Quote(s)
}

// namespaceForm is a DNS label. It has no dots, because the last dot of a key begins the namespace.
var namespaceForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$`)

func deref(m *map[string]string) map[string]string {
	if m == nil {
		return nil
	}
	return *m
}
