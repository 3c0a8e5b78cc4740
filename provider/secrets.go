package provider

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/internal/keylock"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Secrets stores secrets. Changes of one secret are made one at a time.
type Secrets interface {
	// List returns the names of a namespace's secrets, sorted.
	List(namespace string) ([]string, error)
	// Put stores a new or existing secret. Functions that see it see the new value at once. note
	// is what the client should know besides; empty: nothing.
	Put(ctx context.Context, namespace, name string, value []byte) (note string, err error)
	// Delete removes a secret. It is no error if the secret does not exist.
	Delete(ctx context.Context, namespace, name string) error
}

// Mounts shows functions their secrets.
type Mounts interface {
	// Mount sets the secrets that new replicas of a function see. Replicas of earlier deploys keep
	// theirs. The function's name has no namespace.
	Mount(namespace, function string, secrets []string) error
	// Unmount removes all secrets from a removed function.
	Unmount(namespace, function string) error
}

// maxSecret is the largest secret in bytes.
const maxSecret = 1 << 20

var secretForm = regexp.MustCompile(`^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$`)

// maxSecretBody is the largest request with a secret in bytes. JSON may need six bytes for one byte
// of the value.
const maxSecretBody = 7 << 20

func (p *Provider) listSecrets(w http.ResponseWriter, r *http.Request) {
	err := checkNamespace("namespace", namespaceOf("", r))
	var ns string
	if err == nil {
		ns, err = p.queried(r)
	}
	var names []string
	if err == nil {
		names, err = p.Secrets.List(ns)
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	out := []types.Secret{}
	for _, name := range names {
		out = append(out, types.Secret{Name: name, Namespace: ns})
	}
	writeJSON(w, http.StatusOK, out)
}

func (p *Provider) createSecret(w http.ResponseWriter, r *http.Request) {
	p.changeSecret(w, r, http.StatusCreated, func(ctx context.Context, s types.Secret, there bool) error {
		if there {
			return refuse(http.StatusConflict, fmt.Errorf("secret %q exists already in namespace %q, want a PUT to change it", s.Name, s.Namespace))
		}
		if err := admit(p.Registry, s.Namespace); err != nil {
			return err
		}
		// Declares the namespace, so that it is listed, and deleted when it is empty again.
		if !p.Registry.HasNamespace(s.Namespace) {
			return p.declare(ctx, s.Namespace, Namespace{})
		}
		return nil
	})
}

func (p *Provider) updateSecret(w http.ResponseWriter, r *http.Request) {
	p.changeSecret(w, r, http.StatusAccepted, func(_ context.Context, s types.Secret, there bool) error {
		if !there {
			return p.noSecret(s)
		}
		return nil
	})
}

// deleteSecret removes a secret that no function names. A function that names a missing secret
// could not start.
func (p *Provider) deleteSecret(w http.ResponseWriter, r *http.Request) {
	p.changeSecret(w, r, http.StatusAccepted, func(ctx context.Context, s types.Secret, there bool) error {
		if !there {
			return p.noSecret(s)
		}
		var users []string
		for _, d := range p.usersOf(s) {
			users = append(users, d.Declared.Name)
		}
		if len(users) > 0 {
			return refuse(http.StatusConflict, fmt.Errorf("secret %q of namespace %q is used by functions (%s): deploy them without it, or remove them, first",
				s.Name, s.Namespace, some(users)))
		}
		return p.Secrets.Delete(ctx, s.Namespace, s.Name)
	})
}

// changeSecret reads a secret from a request and changes it. prepare runs while nobody else changes
// the store. Unless the secret is deleted, its value is stored after that. The value appears
// neither in the answer nor in the log.
func (p *Provider) changeSecret(w http.ResponseWriter, r *http.Request, done int, prepare func(ctx context.Context, s types.Secret, there bool) error) {
	var s types.Secret
	var note string
	put := r.Method != http.MethodDelete
	err := readJSONOf(w, r, &s, maxSecretBody)
	if err == nil {
		s.Namespace = namespaceOf(s.Namespace, r)
		err = checkSecret(s, put)
	}
	if err == nil {
		note, err = p.secretChanges.run(r.Context(), s, func() (string, error) {
			err := p.changing(r.Context(), func(ctx context.Context) error {
				names, err := p.Secrets.List(s.Namespace)
				if err != nil {
					return err
				}
				return prepare(ctx, s, slices.Contains(names, s.Name))
			})
			if err != nil || !put {
				return "", err
			}
			ctx, cancel := context.WithTimeout(r.Context(), changeTimeout)
			defer cancel()
			return p.Secrets.Put(ctx, s.Namespace, s.Name, valueOf(s))
		})
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	p.Log.Info("secret changed", "method", r.Method, "secret", s.Name, "namespace", s.Namespace)
	if note != "" {
		note = "; " + note
	}
	writeText(w, done, "secret "+s.Name+note)
}

// secretChanges makes the changes of one secret wait for each other. A value may take seconds to
// reach all control planes. Changes of other secrets and of the store do not wait for that.
type secretChanges struct {
	locks keylock.Locks // by namespace/name

	mu sync.Mutex
	in map[string]int // changes under way, by namespace
}

// run calls change while nobody else in this process changes the secret.
func (c *secretChanges) run(ctx context.Context, s types.Secret, change func() (note string, err error)) (note string, err error) {
	wait, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	unlock, err := c.locks.Lock(wait, s.Namespace+"/"+s.Name)
	if err != nil {
		return "", fmt.Errorf("another change of secret %q is still running, try again: %w", s.Name, err)
	}
	defer unlock()
	c.count(s.Namespace, 1)
	defer c.count(s.Namespace, -1)
	return change()
}

func (c *secretChanges) count(namespace string, n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.in == nil {
		c.in = map[string]int{}
	}
	if c.in[namespace] += n; c.in[namespace] == 0 {
		delete(c.in, namespace)
	}
}

// under reports whether a secret of a namespace is being changed.
func (c *secretChanges) under(namespace string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.in[namespace] > 0
}

func checkSecret(s types.Secret, value bool) error {
	if err := checkNamespace("namespace", s.Namespace); err != nil {
		return err
	}
	switch n := len(valueOf(s)); {
	case len(s.Name) > 253 || !secretForm.MatchString(s.Name):
		return &pipeline.FieldError{
			Path: "name", Got: quote(s.Name), Want: "up to 253 lower-case letters, digits, '-' and '.', a letter or digit at both ends",
		}
	case !value:
		return nil
	case n == 0:
		return &pipeline.FieldError{Path: "value", Got: "nothing", Want: "a value, or one in rawValue (base64)"}
	case n > maxSecret:
		return refuse(http.StatusRequestEntityTooLarge, &pipeline.FieldError{
			Path: "value", Got: fmt.Sprintf("%d bytes", n), Want: fmt.Sprintf("at most %d", maxSecret),
		})
	}
	return nil
}

// valueOf returns a secret's value. If rawValue is set, it is the value, and may have any bytes.
// For a file, faas-cli sends rawValue in addition to value.
func valueOf(s types.Secret) []byte {
	if len(s.RawValue) > 0 {
		return s.RawValue
	}
	return []byte(s.Value)
}

func (p *Provider) noSecret(s types.Secret) error {
	if !p.Registry.HasNamespace(s.Namespace) {
		return p.Registry.noNamespace(s.Namespace)
	}
	return refuse(http.StatusNotFound, fmt.Errorf("no secret %q in namespace %q", s.Name, s.Namespace))
}

// usersOf returns the functions that name a secret.
func (p *Provider) usersOf(s types.Secret) []*Deployed {
	var out []*Deployed
	for _, d := range p.Registry.Functions() {
		if d.Declared.Namespace == s.Namespace && slices.Contains(d.Deployment.Secrets, s.Name) {
			out = append(out, d)
		}
	}
	return out
}

// checkSecrets returns an error for each named secret that does not exist.
func (p *Provider) checkSecrets(d types.FunctionDeployment) (errs []error) {
	if len(d.Secrets) == 0 {
		return nil
	}
	there, err := p.Secrets.List(d.Namespace)
	if err != nil {
		return []error{err}
	}
	for i, name := range d.Secrets {
		if !slices.Contains(there, name) {
			errs = append(errs, &pipeline.FieldError{
				Path: fmt.Sprintf("secrets[%d]", i), Got: quote(name),
				Want: fmt.Sprintf("a secret of namespace %q: it has %s (faas-cli secret create)", d.Namespace, some(there)),
			})
		}
	}
	return errs
}

// checkProcess refuses a function that would share a process with one that names other secrets,
// because all functions in a process can read what the process can read.
func (p *Provider) checkProcess(d Deployed) error {
	name := d.Declared.Process
	if name == "" {
		return nil
	}
	its := setOf(d.Deployment.Secrets)
	for _, other := range p.Registry.Functions() {
		if other.Key == d.Key || other.Declared.Namespace != d.Declared.Namespace || other.Declared.Process != name || other.Deployment.EnvProcess != d.Deployment.EnvProcess ||
			// different networks, runtime classes and devices keep their processes separate.
			other.Declared.Network != d.Declared.Network || other.Declared.RuntimeClass != d.Declared.RuntimeClass || !slices.Equal(other.Declared.CDIDevices, d.Declared.CDIDevices) {
			continue
		}
		if theirs := setOf(other.Deployment.Secrets); !slices.Equal(its, theirs) {
			return refuse(http.StatusConflict, fmt.Errorf(
				"function %q names %s, function %q names %s, and both have annotation stagecoach.dev/process: %s, by which they share a process that reads the secrets of both. "+
					"Want the same secrets in both, or another name in the annotation of one. To change the secrets of both, deploy one without the annotation first",
				d.Declared.Name, secretList(its), other.Declared.Name, secretList(theirs), name))
		}
	}
	return nil
}

// setOf returns names sorted and without duplicates.
func setOf(names []string) []string { return slices.Compact(slices.Sorted(slices.Values(names))) }

// secretList formats a set of secrets.
func secretList(names []string) string {
	if len(names) == 0 {
		return "no secrets"
	}
	return "the secrets " + strings.Join(names, ", ")
}
