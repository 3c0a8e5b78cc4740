package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// cached is a parameter set in a node's memory, as GET /system/cache shows it.
type cached struct {
	Node string `json:"node"`
	node.Zygote
}

// cacheOrder is the body of POST /system/cache/warm and /system/cache/evict.
type cacheOrder struct {
	Function  string `json:"function,omitempty"`
	Namespace string `json:"namespace,omitempty"`
	Digest    string `json:"digest,omitempty"` // evict: of an image, or its beginning, in place of a function
	Node      string `json:"node,omitempty"`   // empty: warm: each node; evict: each that has it
}

// cacheDone says what became of a cacheOrder on a node.
type cacheDone struct {
	Node  string `json:"node"`
	Bytes int64  `json:"bytes"` // that came into memory, or were there, or went
}

// cacheAPI serves nodes and what they hold in memory:
//
//	GET  /system/nodes, /system/nodes/NAME
//	GET  /system/cache[?node=&function=&namespace=]
//	POST /system/cache/warm, /system/cache/evict
type cacheAPI struct {
	nodes     nodeList
	functions functionSpecs
}

// functionSpecs knows what is deployed.
type functionSpecs interface {
	// Known reports whether there is a function or a pipeline with this key.
	Known(key pipeline.Key) bool
	// HasNamespace reports whether there is a namespace with this name.
	HasNamespace(name string) bool
	// Spec is what a node starts the function of a key from.
	Spec(key pipeline.Key) (keysmanager.Spec, bool)
}

// Spec implements functionSpecs.
func (d deployed) Spec(key pipeline.Key) (keysmanager.Spec, bool) {
	for _, f := range d.Functions() {
		if s, ok := f.Spec.(keysmanager.Spec); ok && f.Key == key {
			return s, true
		}
	}
	return keysmanager.Spec{}, false
}

func serveNodes(n nodeList, f functionSpecs) http.Handler {
	c := cacheAPI{n, f}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /system/nodes", func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, append([]node.Inventory{}, n.Inventories()...)) // [] and not null
	})
	mux.HandleFunc("GET /system/nodes/{name}", c.node)
	mux.HandleFunc("GET /system/cache", c.list)
	mux.HandleFunc("POST /system/cache/warm", c.change(c.warm))
	mux.HandleFunc("POST /system/cache/evict", c.change(c.evict))
	return mux
}

func (c cacheAPI) node(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	all := c.nodes.Inventories()
	i := slices.IndexFunc(all, func(n node.Inventory) bool { return n.Name == name })
	if i < 0 {
		c.fail(w, r, c.noNode(name))
		return
	}
	answerJSON(w, all[i])
}

// errNoNode is the error of a node that is not there.
var errNoNode = errors.New("no node of this name")

func (c cacheAPI) noNode(name string) error {
	var names []string
	for _, n := range c.nodes.Inventories() {
		names = append(names, n.Name)
	}
	if len(names) == 0 {
		return fmt.Errorf("node %q: %w: there is none, start `stagecoach keysmanager`", name, errNoNode)
	}
	return fmt.Errorf("node %q: %w, want one of: %s", name, errNoNode, strings.Join(names, ", "))
}

func (c cacheAPI) list(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	key := ""
	if name := q.Get("function"); name != "" {
		named := pipeline.Named(name, q.Get("namespace"))
		if key = named.String(); !c.functions.Known(named) {
			c.fail(w, r, c.notDeployed(named, name))
			return
		}
	} else if ns := q.Get("namespace"); ns != "" && !c.functions.HasNamespace(ns) {
		c.fail(w, r, fmt.Errorf("namespace %.100q: %w: no function is there", ns, errNotDeployed))
		return
	}
	if name := q.Get("node"); name != "" && !slices.ContainsFunc(c.nodes.Inventories(), func(n node.Inventory) bool { return n.Name == name }) {
		c.fail(w, r, c.noNode(name))
		return
	}
	out := []cached{}
	wanted := func(filter, is string) bool { return filter == "" || filter == is }
	for _, n := range c.nodes.Inventories() {
		for _, z := range n.Zygotes {
			if wanted(q.Get("node"), n.Name) && wanted(q.Get("namespace"), z.Namespace) && wanted(key, z.Function) {
				out = append(out, cached{n.Name, z})
			}
		}
	}
	answerJSON(w, out)
}

// maxCacheOrder bounds the body of an order in bytes.
const maxCacheOrder = 64 << 10

// change answers an order with what has become of it on each node that it is for.
func (c cacheAPI) change(do func(context.Context, cacheOrder) ([]cacheDone, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		o, err := readCacheOrder(http.MaxBytesReader(w, r.Body, maxCacheOrder))
		var done []cacheDone
		if err == nil {
			done, err = do(r.Context(), o)
		}
		if err != nil {
			c.fail(w, r, err)
			return
		}
		answerJSON(w, done)
	}
}

// readCacheOrder reads the body of an order; what is wrong with it is a *pipeline.FieldError, unless it is too large.
func readCacheOrder(body io.Reader) (o cacheOrder, err error) {
	d := json.NewDecoder(body)
	d.DisallowUnknownFields()
	err = d.Decode(&o)
	const fields = "function, namespace, node and digest"
	var wrong *json.UnmarshalTypeError
	var tooLarge *http.MaxBytesError
	switch {
	case err == nil, errors.As(err, &tooLarge):
		return o, err
	case errors.As(err, &wrong) && wrong.Field != "":
		return o, &pipeline.FieldError{Path: wrong.Field, Got: "a " + wrong.Value, Want: "a string"}
	}
	if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return o, &pipeline.FieldError{Path: strings.Trim(name, `"`), Got: "an unknown field", Want: "one of " + fields}
	}
	return o, &pipeline.FieldError{Path: "body", Got: err.Error(), Want: "a JSON object with " + fields + ", as they are needed"}
}

// function is the key of the one that an order is about.
func (c cacheAPI) function(o cacheOrder) (key pipeline.Key, err error) {
	if o.Function == "" {
		return key, &pipeline.FieldError{Path: "function", Got: strconv.Quote(o.Function), Want: "the name of a function"}
	}
	if key = pipeline.Named(o.Function, o.Namespace); !c.functions.Known(key) {
		return key, c.notDeployed(key, o.Function)
	}
	return key, nil
}

// errNotDeployed is the error of an order about a function that is not there.
var errNotDeployed = errors.New("not deployed")

// notDeployed returns the error for a function that is not deployed, or whose namespace does not
// exist. name is the request's name for the function.
func (c cacheAPI) notDeployed(key pipeline.Key, name string) error {
	if !c.functions.HasNamespace(key.Namespace) {
		return fmt.Errorf("function %.100q: %w: no namespace %.100q", name, errNotDeployed, key.Namespace)
	}
	return fmt.Errorf("function %.100q: %w", name, errNotDeployed)
}

func (c cacheAPI) warm(ctx context.Context, o cacheOrder) ([]cacheDone, error) {
	if o.Digest != "" {
		return nil, &pipeline.FieldError{Path: "digest", Got: strconv.Quote(o.Digest), Want: "none: what is to be loaded is a function's"}
	}
	key, err := c.function(o)
	if err != nil {
		return nil, err
	}
	spec, ok := c.functions.Spec(key)
	if !ok {
		return nil, fmt.Errorf("function %q: %w; it is a pipeline, want one of its stages", o.Function, errNotDeployed)
	}
	return c.each(o.Node, func(name string) (int64, error) { return c.nodes.Load(ctx, name, spec) })
}

// digestForm is what an image's digest looks like, or its beginning.
var digestForm = regexp.MustCompile(`^(sha256:)?[0-9a-f]{8,64}$`)

func (c cacheAPI) evict(ctx context.Context, o cacheOrder) ([]cacheDone, error) {
	if (o.Function == "") == (o.Digest == "") {
		return nil, &pipeline.FieldError{Path: "function", Got: strconv.Quote(o.Function), Want: "the name of a function, or a digest and no function"}
	}
	what, err := "", error(nil)
	if o.Digest != "" {
		what, err = c.digest(o.Digest)
	} else {
		var key pipeline.Key
		key, err = c.function(o)
		what = key.String()
	}
	if err != nil {
		return nil, err
	}
	return c.each(o.Node, func(name string) (int64, error) { return c.nodes.Evict(ctx, name, what) })
}

// digest completes the beginning of the digest of parameters that are in memory.
func (c cacheAPI) digest(beginning string) (string, error) {
	if !digestForm.MatchString(beginning) {
		return "", &pipeline.FieldError{Path: "digest", Got: strconv.Quote(beginning), Want: "eight or more of an image's hexadecimal digits, as the cache's list has them"}
	}
	found := ""
	for _, n := range c.nodes.Inventories() {
		for _, z := range n.Zygotes {
			short := strings.TrimPrefix(z.Digest, "sha256:")
			if !strings.HasPrefix(short, strings.TrimPrefix(beginning, "sha256:")) || z.Digest == found {
				continue
			}
			if found != "" {
				return "", &pipeline.FieldError{Path: "digest", Got: strconv.Quote(beginning), Want: "more of it: several begin so"}
			}
			found = z.Digest
		}
	}
	if found == "" {
		return "", fmt.Errorf("digest %q: %w", beginning, keysmanager.ErrNotCached)
	}
	return found, nil
}

// each does something on the node of a name, or, one after the other, on all: then one that has nothing in memory is passed over
// if another has.
func (c cacheAPI) each(name string, do func(name string) (int64, error)) ([]cacheDone, error) {
	var done []cacheDone
	var errs, without []error
	for _, n := range c.nodes.Inventories() {
		if name != "" && n.Name != name {
			continue
		}
		bytes, err := do(n.Name)
		switch {
		case err == nil:
			done = append(done, cacheDone{n.Name, bytes})
		case errors.Is(err, keysmanager.ErrNotCached):
			without = append(without, on(n.Name, err))
		default:
			errs = append(errs, on(n.Name, err))
		}
	}
	switch {
	case len(errs) > 0 || len(done) > 0:
		return done, errors.Join(errs...)
	case len(without) > 0:
		return nil, errors.Join(without...)
	case name != "":
		return nil, c.noNode(name)
	}
	return nil, errors.New("there is no node: start `stagecoach keysmanager`")
}

// on says where an error is from, unless it says so itself, as those of daemons do.
func on(name string, err error) error {
	var of *node.Error
	if errors.As(err, &of) {
		return err
	}
	return &node.Error{Node: name, Err: err}
}

// fail answers with an error: text, or JSON for who asks for it with Accept.
func (c cacheAPI) fail(w http.ResponseWriter, r *http.Request, err error) {
	is := func(kind error) bool { return errors.Is(err, kind) }
	var field *pipeline.FieldError
	var tooLarge *http.MaxBytesError
	status := http.StatusServiceUnavailable
	switch {
	case errors.As(err, &tooLarge):
		status = http.StatusRequestEntityTooLarge
	case errors.As(err, &field), is(keysmanager.ErrNoModel):
		status = http.StatusBadRequest
	case is(errNoNode), is(errNotDeployed), is(keysmanager.ErrNotCached):
		status = http.StatusNotFound
	case is(keysmanager.ErrBusy):
		status = http.StatusConflict
	case is(keysmanager.ErrNoRoom):
		status = http.StatusInsufficientStorage
	}
	if status >= http.StatusInternalServerError {
		w.Header().Set("X-OpenFaaS-Internal", "stagecoach")
	}
	if !strings.Contains(r.Header.Get("Accept"), "application/json") {
		http.Error(w, err.Error(), status)
		return
	}
	type wrong struct {
		Path string `json:"path"`
		Got  string `json:"got"`
		Want string `json:"want"`
	}
	body := struct {
		Error  string  `json:"error"`
		Fields []wrong `json:"fields,omitempty"`
	}{Error: err.Error()}
	if field != nil {
		body.Fields = []wrong{wrong(*field)}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body) // fails only when the client is gone
}
