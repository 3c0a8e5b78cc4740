package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// Operator shows nodes, and changes which of them have replicas. Its errors are ErrNoNode,
// ErrNotNow, or those of the platform. Every operation may be repeated.
type Operator interface {
	// List returns all nodes by name, silent ones and cordoned ones that were never heard included.
	List() []schema.Node
	// Cordon closes a node to new replicas, and Uncordon opens it again. Uncordon also stops a drain.
	Cordon(ctx context.Context, name string) error
	Uncordon(ctx context.Context, name string) error
	// Drain cordons a node and moves its replicas elsewhere. It returns before that is done. With
	// Force, the replicas that are left end at once.
	Drain(ctx context.Context, name string, o schema.DrainOrder) error
	// Progress says how far the drain of a node is.
	Progress(name string) (schema.Drain, error)
	// Remove forgets a node that is silent or drained.
	Remove(ctx context.Context, name string) error
}

// ErrNotNow means that an operation does not apply to a node in its present state.
var ErrNotNow = errors.New("not now")

// operatorAPI serves an Operator:
//
//	GET    /system/nodes, /system/nodes/NAME
//	POST   /system/nodes/NAME/cordon, /system/nodes/NAME/uncordon
//	POST   /system/nodes/NAME/drain, GET /system/nodes/NAME/drain
//	DELETE /system/nodes/NAME
type operatorAPI struct {
	cacheAPI

	o Operator
}

func (a operatorAPI) register(mux *http.ServeMux) {
	mux.HandleFunc("GET /system/nodes", func(w http.ResponseWriter, _ *http.Request) {
		answerJSON(w, append([]schema.Node{}, a.o.List()...)) // [] and not null
	})
	mux.HandleFunc("GET /system/nodes/{name}", a.named(a.show))
	mux.HandleFunc("POST /system/nodes/{name}/cordon", a.named(func(r *http.Request, name string) (any, error) {
		return a.after(r, name, a.o.Cordon(r.Context(), name))
	}))
	mux.HandleFunc("POST /system/nodes/{name}/uncordon", a.named(func(r *http.Request, name string) (any, error) {
		return a.after(r, name, a.o.Uncordon(r.Context(), name))
	}))
	mux.HandleFunc("POST /system/nodes/{name}/drain", a.named(func(r *http.Request, name string) (any, error) {
		o, err := readDrainOrder(r.Body)
		if err == nil {
			err = a.o.Drain(r.Context(), name, o)
		}
		if err != nil {
			return nil, err
		}
		return a.o.Progress(name)
	}))
	mux.HandleFunc("GET /system/nodes/{name}/drain", a.named(func(_ *http.Request, name string) (any, error) {
		return a.o.Progress(name)
	}))
	mux.HandleFunc("DELETE /system/nodes/{name}", a.named(func(r *http.Request, name string) (any, error) {
		err := a.o.Remove(r.Context(), name)
		return struct {
			Removed string `json:"removed"`
		}{name}, err
	}))
}

// named serves a request about a node. Its name is checked first.
func (a operatorAPI) named(do func(r *http.Request, name string) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		name := r.PathValue("name")
		var out any
		err := nodeName(name)
		if err == nil {
			out, err = do(r, name)
		}
		if errors.Is(err, ErrNoNode) {
			err = a.noNode(name)
		}
		if err != nil {
			a.fail(w, r, err)
			return
		}
		answerJSON(w, out)
	}
}

// nodeName returns the error for a text that can be no node's name.
func nodeName(name string) error {
	if err := node.CheckName(name); err != nil {
		return &pipeline.FieldError{Path: "name", Got: strconv.Quote(name[:min(len(name), 100)]), Want: "the name of a node: no spaces and slashes"}
	}
	return nil
}

// after returns a node after an operation on it.
func (a operatorAPI) after(r *http.Request, name string, err error) (any, error) {
	if err != nil {
		return nil, err
	}
	return a.show(r, name)
}

func (a operatorAPI) show(_ *http.Request, name string) (any, error) {
	for _, n := range a.o.List() {
		if n.Name == name {
			return n, nil
		}
	}
	return nil, ErrNoNode
}

// noNode returns the error for a name that no node has.
func (a operatorAPI) noNode(name string) error {
	var names []string
	for _, n := range a.o.List() {
		names = append(names, n.Name)
	}
	return noNodeOf(name, names)
}

// maxDrainOrder bounds the body of an order to drain, in bytes.
const maxDrainOrder = 4 << 10

// readDrainOrder reads the body of an order to drain, which may be empty.
func readDrainOrder(body io.Reader) (o schema.DrainOrder, err error) {
	b, err := io.ReadAll(io.LimitReader(body, maxDrainOrder+1))
	if err != nil || len(strings.TrimSpace(string(b))) == 0 {
		return o, err
	}
	const want = "a JSON object with keepParameters and force, which are true or false"
	if len(b) > maxDrainOrder {
		return o, &pipeline.FieldError{Path: "body", Got: fmt.Sprintf("more than %d bytes", maxDrainOrder), Want: want}
	}
	d := json.NewDecoder(strings.NewReader(string(b)))
	d.DisallowUnknownFields()
	if err := d.Decode(&o); err != nil {
		return o, &pipeline.FieldError{Path: "body", Got: err.Error(), Want: want}
	}
	if d.More() {
		return o, &pipeline.FieldError{Path: "body", Got: "something after the JSON object", Want: want}
	}
	return o, nil
}
