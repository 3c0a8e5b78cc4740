package kubernetes

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
)

// annotation is the one by which a namespace of Kubernetes opts in, as in OpenFaaS.
const annotation = "openfaas"

// Namespaces says which namespaces functions may be in. Its methods are safe for concurrent use.
type Namespaces struct {
	listed  []string
	first   string // needs no annotation
	log     *slog.Logger
	stop    context.CancelFunc
	running sync.WaitGroup

	mu    sync.Mutex
	optIn bool            // namespaces need the annotation
	known map[string]bool // by name: whether it opts in
	bad   error           // why namespaces are not known yet; nil: they are
}

// NewNamespaces returns the namespaces of a list. first is the default one.
func NewNamespaces(listed []string, first string, log *slog.Logger) *Namespaces {
	return &Namespaces{listed: slices.Compact(slices.Sorted(slices.Values(listed))), first: first, log: log, stop: func() {}}
}

// Follow makes the namespaces those of the list that exist in Kubernetes with the annotation
// openfaas: "1", and the default one. It follows changes until Close.
func (n *Namespaces) Follow(c *kube.Client) {
	n.mu.Lock()
	n.optIn, n.known, n.bad = true, map[string]bool{}, fmt.Errorf("namespaces of Kubernetes were not listed yet")
	n.mu.Unlock()
	ctx, cancel := context.WithCancel(context.Background())
	n.stop = cancel
	n.running.Go(func() {
		c.Follow(ctx, kube.Objects{Resource: "namespaces"}, kube.Follower{
			Listed: func(_ context.Context, all []kube.Meta) error {
				n.mu.Lock()
				defer n.mu.Unlock()
				clear(n.known)
				for _, m := range all {
					n.note(m)
				}
				n.bad = nil
				return nil
			},
			Changed: func(_ context.Context, m kube.Meta, gone bool) error {
				n.mu.Lock()
				defer n.mu.Unlock()
				if n.note(m); gone {
					delete(n.known, m.Name)
				}
				return nil
			},
			Failed: func(err error) {
				n.mu.Lock()
				if n.bad != nil {
					n.bad = err
				}
				n.mu.Unlock()
				n.log.Error("cannot watch namespaces in Kubernetes; retrying", "error", err)
			},
		})
	})
}

// note stores whether a namespace opts in. The caller holds n.mu.
func (n *Namespaces) note(m kube.Meta) {
	value := m.Annotations[annotation]
	n.known[m.Name] = (value == "1" || value == "true") && m.Deleted == ""
}

// Close ends Follow.
func (n *Namespaces) Close() {
	n.stop()
	n.running.Wait()
}

// Names returns the namespaces that functions may be in, sorted.
func (n *Namespaces) Names() (names []string) {
	for _, name := range n.listed {
		if n.Admit(name) == nil {
			names = append(names, name)
		}
	}
	return names
}

// Admit returns why functions may not be in a namespace, or nil.
func (n *Namespaces) Admit(name string) error {
	if !slices.Contains(n.listed, name) {
		return fmt.Errorf("%s", notUsed(n.listed))
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if !n.optIn || name == n.first {
		return nil
	}
	opted, there := n.known[name]
	switch {
	case n.bad != nil:
		return n.bad
	case !there:
		return fmt.Errorf("Kubernetes has no namespace %q", name) //nolint:staticcheck // a name
	case !opted:
		return fmt.Errorf("the namespace of Kubernetes has not opted in: kubectl annotate namespace %s %s=1", name, annotation)
	}
	return nil
}

// notUsed says why functions may not be in a namespace that is not in the list.
func notUsed(listed []string) string {
	return "functions may be in these namespaces of Kubernetes alone (up --kube-namespaces): " + strings.Join(listed, ", ")
}
