package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// cacheAPI serves nodes and the parameters in their memory:
//
//	GET  /system/cache[?node=&function=&namespace=]
//	POST /system/cache/warm, /system/cache/evict
type cacheAPI struct {
	nodes     Nodes
	codes     node.Codes // of errors of nodes
	functions Functions
}

func serveNodes(n Nodes, o Operator, m Membership, codes node.Codes, f Functions) http.Handler {
	c := cacheAPI{n, codes, f}
	mux := http.NewServeMux()
	operatorAPI{c, o}.register(mux)
	members{m, c}.register(mux)
	mux.HandleFunc("GET /system/cache", c.list)
	mux.HandleFunc("POST /system/cache/warm", c.change(c.warm))
	mux.HandleFunc("POST /system/cache/evict", c.change(c.evict))
	return mux
}

// ErrNoNode means that no node has this name.
var ErrNoNode = errors.New("no node of this name")

func (c cacheAPI) noNode(name string) error {
	var names []string
	for _, n := range c.nodes.Inventories() {
		names = append(names, n.Name)
	}
	return noNodeOf(name, names)
}

// noNodeOf returns the error for a name that is not among the names of nodes.
func noNodeOf(name string, names []string) error {
	if len(names) == 0 {
		return fmt.Errorf("node %q: %w: there is none, start `stagecoach keysmanager`", name, ErrNoNode)
	}
	return fmt.Errorf("node %q: %w, want one of: %s", name, ErrNoNode, strings.Join(names, ", "))
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
		c.fail(w, r, fmt.Errorf("namespace %.100q: %w: no function is there", ns, ErrNotDeployed))
		return
	}
	if name := q.Get("node"); name != "" && !slices.ContainsFunc(c.nodes.Inventories(), func(n node.Inventory) bool { return n.Name == name }) {
		c.fail(w, r, c.noNode(name))
		return
	}
	out := []schema.Cached{}
	wanted := func(filter, is string) bool { return filter == "" || filter == is }
	for _, n := range c.nodes.Inventories() {
		for _, z := range n.Zygotes {
			if wanted(q.Get("node"), n.Name) && wanted(q.Get("namespace"), z.Namespace) && wanted(key, z.Function) {
				out = append(out, schema.Cached{Node: n.Name, Zygote: z})
			}
		}
	}
	answerJSON(w, out)
}

// maxCacheOrder bounds the body of an order, in bytes.
const maxCacheOrder = 64 << 10

// change serves an order. It answers with the result on each node.
func (c cacheAPI) change(do func(context.Context, schema.CacheOrder) ([]schema.CacheDone, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		o, err := readCacheOrder(http.MaxBytesReader(w, r.Body, maxCacheOrder))
		var done []schema.CacheDone
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

// readCacheOrder reads the body of an order. The error is a *pipeline.FieldError, unless the body
// is too large.
func readCacheOrder(body io.Reader) (o schema.CacheOrder, err error) {
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

// function returns the key of an order's function.
func (c cacheAPI) function(o schema.CacheOrder) (key pipeline.Key, err error) {
	if o.Function == "" {
		return key, &pipeline.FieldError{Path: "function", Got: strconv.Quote(o.Function), Want: "the name of a function"}
	}
	if key = pipeline.Named(o.Function, o.Namespace); !c.functions.Known(key) {
		return key, c.notDeployed(key, o.Function)
	}
	return key, nil
}

// ErrNotDeployed means that there is no such function.
var ErrNotDeployed = errors.New("not deployed")

// notDeployed returns the error for a function that is not deployed, or whose namespace does not
// exist. name is the request's name for the function.
func (c cacheAPI) notDeployed(key pipeline.Key, name string) error {
	if !c.functions.HasNamespace(key.Namespace) {
		return fmt.Errorf("function %.100q: %w: no namespace %.100q", name, ErrNotDeployed, key.Namespace)
	}
	return fmt.Errorf("function %.100q: %w", name, ErrNotDeployed)
}

func (c cacheAPI) warm(ctx context.Context, o schema.CacheOrder) ([]schema.CacheDone, error) {
	if o.Digest != "" {
		return nil, &pipeline.FieldError{Path: "digest", Got: strconv.Quote(o.Digest), Want: "none: what is to be loaded is a function's"}
	}
	key, err := c.function(o)
	if err != nil {
		return nil, err
	}
	if _, ok := c.functions.Function(key); !ok {
		return nil, fmt.Errorf("function %q: %w; it is a pipeline, want one of its stages", o.Function, ErrNotDeployed)
	}
	return c.each(o.Node, func(name string) (int64, error) { return c.nodes.Load(ctx, name, key) })
}

func (c cacheAPI) evict(ctx context.Context, o schema.CacheOrder) ([]schema.CacheDone, error) {
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

// digest returns the full digest of parameters in memory, from its beginning.
func (c cacheAPI) digest(beginning string) (string, error) {
	if !schema.IsDigest(beginning) {
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
		return "", fmt.Errorf("digest %q: %w", beginning, c.codes[node.CodeNotCached])
	}
	return found, nil
}

// each calls do for the named node, or for all nodes in turn if the name is empty. In the second
// case, it is enough if one node has the parameters in memory.
func (c cacheAPI) each(name string, do func(name string) (int64, error)) ([]schema.CacheDone, error) {
	var done []schema.CacheDone
	var errs, without []error
	for _, n := range c.nodes.Inventories() {
		if name != "" && n.Name != name {
			continue
		}
		bytes, err := do(n.Name)
		switch {
		case err == nil:
			done = append(done, schema.CacheDone{Node: n.Name, Bytes: bytes})
		case c.is(err, node.CodeNotCached):
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

// on adds the name of the node to an error, unless the error has it, as errors of daemons do.
func on(name string, err error) error {
	var of *node.Error
	if errors.As(err, &of) {
		return err
	}
	return &node.Error{Node: name, Err: err}
}

// is reports whether an error is the one with a code.
func (c cacheAPI) is(err error, code node.Code) bool {
	return c.codes[code] != nil && errors.Is(err, c.codes[code])
}

// fail answers with an error: as text, or as JSON if the client accepts JSON.
func (c cacheAPI) fail(w http.ResponseWriter, r *http.Request, err error) {
	var field *pipeline.FieldError
	var tooLarge *http.MaxBytesError
	status := http.StatusServiceUnavailable
	switch {
	case errors.As(err, &tooLarge):
		status = http.StatusRequestEntityTooLarge
	case errors.As(err, &field), c.is(err, node.CodeNoModel):
		status = http.StatusBadRequest
	case errors.Is(err, ErrNoNode), errors.Is(err, ErrNoToken), errors.Is(err, ErrNotDeployed), c.is(err, node.CodeNotCached):
		status = http.StatusNotFound
	case c.is(err, node.CodeBusy), errors.Is(err, ErrNotNow), errors.Is(err, ErrNoAuthority):
		status = http.StatusConflict
	case c.is(err, node.CodeNoRoom):
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
