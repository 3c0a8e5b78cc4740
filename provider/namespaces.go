package provider

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Outside says which namespaces there are, if something else than the API makes them, such as
// Kubernetes. Functions of other namespaces that were deployed earlier stay.
type Outside interface {
	// Names returns the namespaces that functions may be deployed into, sorted.
	Names() []string
	// Admit returns why functions may not be deployed into a namespace, or nil.
	Admit(namespace string) error
}

// admit returns an error if functions may not be deployed into a namespace.
func admit(r *Registry, namespace string) error {
	if r.Outside == nil {
		return nil
	}
	if err := r.Outside.Admit(namespace); err != nil {
		return &pipeline.FieldError{Path: "namespace", Got: quote(namespace), Want: "a namespace for functions: " + err.Error()}
	}
	return nil
}

// functionsOf returns the names of a namespace's functions, sorted.
func (p *Provider) functionsOf(namespace string) []string {
	var out []string
	for _, d := range p.Registry.Functions() {
		if d.Declared.Namespace == namespace {
			out = append(out, d.Declared.Name)
		}
	}
	return out
}

func (p *Provider) namespaces(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, http.StatusOK, p.Registry.namespaceNames())
}

func (p *Provider) namespace(w http.ResponseWriter, r *http.Request) {
	name := r.PathValue("name")
	if !p.Registry.HasNamespace(name) {
		p.fail(w, r, p.Registry.noNamespace(name))
		return
	}
	n := p.Registry.Namespaces()[name]
	writeJSON(w, http.StatusOK, types.FunctionNamespace{Name: name, Labels: n.Labels, Annotations: n.Annotations})
}

// queried returns the namespace that a request's query names. It returns an error if the namespace
// does not exist.
func (p *Provider) queried(r *http.Request) (string, error) {
	ns := namespaceOf("", r)
	if !p.Registry.HasNamespace(ns) {
		return "", p.Registry.noNamespace(ns)
	}
	return ns, nil
}

// createNamespace takes the name from the body, as faas-cli sends it, or from the path.
func (p *Provider) createNamespace(w http.ResponseWriter, r *http.Request) {
	p.changeNamespace(w, r, http.StatusCreated, func(ctx context.Context, n types.FunctionNamespace) error {
		if p.Registry.HasNamespace(n.Name) {
			return refuse(http.StatusConflict, fmt.Errorf("namespace %q exists already, want a PUT to change it", n.Name))
		}
		return p.declare(ctx, n.Name, Namespace{Labels: n.Labels, Annotations: n.Annotations})
	})
}

func (p *Provider) updateNamespace(w http.ResponseWriter, r *http.Request) {
	p.changeNamespace(w, r, http.StatusAccepted, func(ctx context.Context, n types.FunctionNamespace) error {
		if !p.Registry.HasNamespace(n.Name) {
			return p.Registry.noNamespace(n.Name)
		}
		return p.declare(ctx, n.Name, Namespace{Labels: n.Labels, Annotations: n.Annotations})
	})
}

// deleteNamespace removes an empty namespace. It refuses one with functions or secrets, which must
// be removed first.
func (p *Provider) deleteNamespace(w http.ResponseWriter, r *http.Request) {
	p.changeNamespace(w, r, http.StatusAccepted, func(ctx context.Context, n types.FunctionNamespace) error {
		secrets, err := p.Secrets.List(n.Name)
		if err != nil {
			return err
		}
		functions := p.functionsOf(n.Name)
		switch {
		case n.Name == pipeline.DefaultNamespace:
			return refuse(http.StatusForbidden, fmt.Errorf("namespace %q is the default namespace, which cannot be deleted", n.Name))
		case !p.Registry.HasNamespace(n.Name):
			return p.Registry.noNamespace(n.Name)
		case len(functions)+len(secrets) > 0:
			return refuse(http.StatusConflict, fmt.Errorf("namespace %q has functions (%s) and secrets (%s), want it empty: remove them first",
				n.Name, some(functions), some(secrets)))
		case p.secretChanges.under(n.Name): // a new secret may not be in the list yet
			return refuse(http.StatusConflict, fmt.Errorf("a secret of namespace %q is being changed: try again later", n.Name))
		}
		key := namespacePrefix + n.Name
		if err := p.Store.Delete(ctx, key); err != nil {
			return fmt.Errorf("namespace %q: %w", n.Name, err)
		}
		p.Log.Info("namespace deleted", "namespace", n.Name)
		return p.Registry.waitGone(ctx, key)
	})
}

// changeNamespace reads a request's namespace and changes it.
func (p *Provider) changeNamespace(w http.ResponseWriter, r *http.Request, done int, change func(context.Context, types.FunctionNamespace) error) {
	var n types.FunctionNamespace
	err := error(nil)
	if r.Method != http.MethodDelete { // the body of a DELETE has no other fields
		err = readJSON(w, r, &n)
	}
	if path := r.PathValue("name"); err == nil && path != "" {
		if n.Name = cmp.Or(n.Name, path); n.Name != path {
			err = &pipeline.FieldError{Path: "name", Got: quote(n.Name), Want: quote(path) + " as in the path"}
		}
	}
	if err == nil {
		err = checkNamespace("name", n.Name)
	}
	if err == nil && p.Registry.Outside != nil {
		err = refuse(http.StatusForbidden, fmt.Errorf("namespace %q: functions are in namespaces of Kubernetes, which its own tools change (kubectl)", n.Name))
	}
	if err == nil {
		err = p.changing(r.Context(), func(ctx context.Context) error { return change(ctx, n) })
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	writeText(w, done, "namespace "+n.Name)
}

// declare stores a namespace. The caller holds the token p.change.
func (p *Provider) declare(ctx context.Context, name string, n Namespace) error {
	value, err := encodeNamespace(name, n)
	if err != nil {
		return err
	}
	rev, err := p.Store.Put(ctx, namespacePrefix+name, value)
	if err != nil {
		return fmt.Errorf("namespace %q: %w", name, err)
	}
	p.Log.Info("namespace declared", "namespace", name, "revision", rev)
	return p.Registry.wait(ctx, rev)
}

// some joins the first of many names.
func some(names []string) string {
	const most = 5
	if len(names) > most {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return cmp.Or(strings.Join(names, ", "), "none")
}
