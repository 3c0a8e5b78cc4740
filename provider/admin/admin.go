// Package admin serves Stagecoach's own part of the management API: async calls and dead letters,
// timelines, explanations, learned demand, nodes and the parameters in their memory, and what
// `stagecoach top` shows. Package provider serves OpenFaaS's part. Package schema has the JSON
// types of admin's answers.
package admin

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/request/flow"
	"github.com/stagecoach-serving/stagecoach/request/gateway"
	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// Config has the parts that the API describes. Every field is required.
type Config struct {
	Registry *provider.Registry
	Calls    *Calls
	Journal  Journal
	Requests Requests
	Loop     Loop
	Replicas Replicas
	Lines    Lines
	Recent   RecentRequests
	Nodes    Nodes
	Operator Operator
	Demand   Demand
	Members  Membership
	Codes    node.Codes                    // of errors of Nodes
	Events   func(n int) []schema.TopEvent // the latest n events, in order
	// Planes returns the control planes of the cluster that are alive, this one first; none if this
	// process is the only one that there can be.
	Planes func() []schema.ControlPlane
}

// Journal has the dead letters; a *queue.Journal is one.
type Journal interface {
	// Dead returns dead letters of the wanted functions, the oldest first, and at most limit of
	// them. If after is the id of a letter, Dead begins with the next letter. It also returns
	// whether more letters follow. If wanted is nil, all functions are wanted.
	Dead(wanted func(function string) bool, after string, limit int) (letters []queue.DeadLetter, more bool, err error)
	// DeadLetter returns a letter with its content, or an error that is queue.ErrNoLetter.
	DeadLetter(ctx context.Context, id string) (queue.DeadLetter, []byte, error)
	// Redrive accepts the request of a letter again, and DropDead deletes the letter. The error is
	// queue.ErrNoLetter if there is no such letter.
	Redrive(ctx context.Context, id string) error
	DropDead(id string) error
}

// Requests knows where requests are.
type Requests interface {
	// Where returns the stages that a request is in. id is that of its record.
	Where(id string) []flow.Progress
}

// Loop knows the decisions of the autoscaler; a *control.Loop is one.
type Loop interface {
	// Last returns the plan that was applied last, and the Snapshot that it was made from.
	Last() (plan.Snapshot, plan.Plan)
	Policies() policy.Names
	// Trouble returns why no plan was made since; empty: there is no trouble.
	Trouble() string
	// ModelErrors compares predictions with measurements, by function.
	ModelErrors() map[string]autoscaler.ModelError
}

// Replicas knows the replicas of all functions, and their past.
type Replicas interface {
	ReplicaCounts
	// Events returns the latest events of a function, in order.
	Events(function pipeline.Key) []schema.Event
	// PinnedUntil returns until when a function is held at one replica, at least, because it is
	// measured.
	PinnedUntil(function pipeline.Key) (until time.Time, pinned bool)
}

// ReplicaCounts counts replicas.
type ReplicaCounts interface {
	// Counts counts the replicas of all functions, without those on silent nodes.
	Counts() map[pipeline.Key]Count
	// Ready returns how many replicas of a function are ready, with those on silent nodes.
	Ready(function pipeline.Key) int
	// Failure returns how many starts of a function have failed in a row, when the next one is tried,
	// and the cause of the latest.
	Failure(function pipeline.Key) (count int, until time.Time, cause string)
}

// Count counts the replicas of a function by their state.
type Count struct{ Ready, Starting, Draining int }

// Lines knows the tasks of all functions.
type Lines interface {
	Signals(function pipeline.Key, now time.Time) plan.Signals
	// Waited returns how long the latest tasks have waited.
	Waited(function pipeline.Key) time.Duration
	Load(function pipeline.Key) task.Load
}

// RecentRequests knows the requests that have ended.
type RecentRequests interface {
	// Recent summarizes the last 15 seconds of a function or pipeline. objective is its SLO; 0: none.
	Recent(key pipeline.Key, objective time.Duration) gateway.Recent
}

// Functions knows the deployed functions; a *provider.Registry is one.
type Functions interface {
	// Known reports whether there is a function or a pipeline with this key.
	Known(key pipeline.Key) bool
	// HasNamespace reports whether there is a namespace with this name.
	HasNamespace(name string) bool
	// Function returns the function with this key. A pipeline is none.
	Function(key pipeline.Key) (provider.Deployed, bool)
}

// Nodes knows the nodes, and changes the parameters in their memory.
type Nodes interface {
	// Inventories returns what each node has, sorted by name. A silent node is left out.
	Inventories() []node.Inventory
	// Load loads the parameters of a function into the memory of a node. It returns their size in
	// bytes when that is done. The error is ErrNotDeployed if the function was removed meanwhile.
	Load(ctx context.Context, node string, function pipeline.Key) (bytes int64, err error)
	// Evict frees parameters that no replica needs. what is the key of a function, or the digest of
	// an image. It returns how many bytes it has freed.
	Evict(ctx context.Context, node, what string) (bytes int64, err error)
}

// Register adds the paths of the API to a mux, which the caller guards.
func Register(mux *http.ServeMux, c Config) {
	dead := serveDead(c.Journal)
	mux.Handle("/system/dead", dead)
	mux.Handle("/system/dead/", dead)
	mux.Handle("GET /system/async/{id}", callAPI{c.Calls, c.Journal, c.Requests})
	mux.Handle("GET /system/timeline/{name}", serveTimeline(c))
	mux.Handle("GET /system/pipelines/{name}/explain", serveExplain(c.Registry, c.Loop, c.Replicas))
	mux.Handle("GET /system/demand/{name}", serveDemand(c.Registry, c.Demand))
	nodes := serveNodes(c.Nodes, c.Operator, c.Members, c.Codes, c.Registry)
	for _, path := range []string{"/system/nodes", "/system/nodes/", "/system/cache", "/system/cache/"} {
		mux.Handle(path, nodes)
	}
	mux.HandleFunc("GET /system/control-planes", func(w http.ResponseWriter, _ *http.Request) { answerJSON(w, c.Planes()) })
	mux.Handle("GET /system/top", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(c.top(time.Now().UTC())) // the client may be gone
	}))
}

// answerJSON answers with v as JSON.
func answerJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	_ = e.Encode(v) // our own types encode; a write fails only when the client is gone
}
