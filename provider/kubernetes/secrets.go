package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
)

// ours selects the Secrets that are secrets of functions: those of this program, and those that
// somebody has made for functions as in OpenFaaS.
const ours = kube.LabelManaged + " in (" + kube.Managed + "," + openFaaS + ")"

// openFaaS is the value of [kube.LabelManaged] in Secrets of OpenFaaS.
const openFaaS = "openfaas"

// Copies has copies of secrets, for functions. A copy changes where functions see it.
type Copies interface {
	List(namespace string) ([]string, error)
	Put(namespace, name string, value []byte) error
	Delete(namespace, name string) error
}

// SecretsConfig says where secrets are. All fields are required.
type SecretsConfig struct {
	Cluster    *kube.Client
	Namespaces []string // in which there may be secrets
	Copies     Copies   // in memory; nobody else changes it
	Log        *slog.Logger
}

// Secrets are the secrets of functions, as Secrets of Kubernetes. All processes that follow them
// see the same secrets. Its methods are safe for concurrent use.
type Secrets struct {
	cfg     SecretsConfig
	changed func(namespace, name string)
	stop    context.CancelFunc
	running sync.WaitGroup

	// held while a copy is made, from the read of the Secret until the copy is there. So an earlier
	// value cannot replace a later one.
	copying  sync.Mutex
	versions map[kube.Secret]string // resource versions of the copies

	mu  sync.Mutex
	bad map[string]error // by namespace: why it was never listed
}

// firstTimeout bounds the time for the first list of all secrets.
const firstTimeout = 15 * time.Second

// OpenSecrets reads all secrets once. A namespace that cannot be read now is logged, and read
// later.
func OpenSecrets(ctx context.Context, cfg SecretsConfig) *Secrets {
	s := &Secrets{cfg: cfg, changed: func(string, string) {}, stop: func() {}, versions: map[kube.Secret]string{}, bad: map[string]error{}}
	ctx, cancel := context.WithTimeout(ctx, firstTimeout)
	defer cancel()
	var reads sync.WaitGroup
	for _, namespace := range cfg.Namespaces {
		s.bad[namespace] = errors.New("its secrets were not listed yet")
		reads.Go(func() {
			all, _, err := cfg.Cluster.List(ctx, secretsOf(namespace))
			if err == nil {
				err = s.take(ctx, namespace, all)
			}
			if err != nil {
				s.failed(namespace, err)
			}
		})
	}
	reads.Wait()
	return s
}

func secretsOf(namespace string) kube.Objects {
	return kube.Objects{Resource: "secrets", Namespace: namespace, Selector: ours}
}

// Follow follows changes that others make until Close. changed is called after each change of a
// copy.
func (s *Secrets) Follow(changed func(namespace, name string)) {
	ctx, cancel := context.WithCancel(context.Background())
	s.changed, s.stop = changed, cancel
	for _, namespace := range s.cfg.Namespaces {
		s.running.Go(func() {
			s.cfg.Cluster.Follow(ctx, secretsOf(namespace), kube.Follower{
				Listed: func(ctx context.Context, all []kube.Meta) error { return s.take(ctx, namespace, all) },
				Changed: func(ctx context.Context, m kube.Meta, gone bool) error {
					if gone {
						m.Version = ""
					}
					return s.refresh(ctx, kube.Secret{Namespace: namespace, Name: m.Name}, m.Version)
				},
				Failed: func(err error) { s.failed(namespace, err) },
			})
		})
	}
}

// Close ends Follow.
func (s *Secrets) Close() {
	s.stop()
	s.running.Wait()
}

// failed notes and logs why a namespace is not followed now.
func (s *Secrets) failed(namespace string, err error) {
	s.mu.Lock()
	if _, never := s.bad[namespace]; never {
		s.bad[namespace] = err
	}
	s.mu.Unlock()
	s.cfg.Log.Error("cannot watch secrets in Kubernetes; retrying", "namespace", namespace, "error", err)
}

// take makes the copies of a namespace the same as its Secrets.
func (s *Secrets) take(ctx context.Context, namespace string, all []kube.Meta) error {
	have, err := s.cfg.Copies.List(namespace)
	if err != nil {
		return err
	}
	for _, m := range all {
		have = slices.DeleteFunc(have, func(name string) bool { return name == m.Name })
		if err := s.refresh(ctx, kube.Secret{Namespace: namespace, Name: m.Name}, m.Version); err != nil {
			return err
		}
	}
	for _, name := range have { // deleted meanwhile, or made after the list
		if err := s.refresh(ctx, kube.Secret{Namespace: namespace, Name: name}, ""); err != nil {
			return err
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.bad, namespace)
	return nil
}

// refresh makes a copy the same as its Secret, unless it is of this version already.
func (s *Secrets) refresh(ctx context.Context, at kube.Secret, version string) error {
	s.copying.Lock()
	defer s.copying.Unlock()
	if version != "" && s.versions[at] == version {
		return nil
	}
	o, err := s.cfg.Cluster.Secret(ctx, at)
	gone := kube.NotFound(err)
	if err != nil && !gone {
		return err
	}
	if !gone && !isOurs(o.Metadata) {
		gone = true
	}
	if gone {
		delete(s.versions, at)
		return s.cfg.Copies.Delete(at.Namespace, at.Name)
	}
	s.versions[at] = o.Metadata.Version
	key, err := keyOf(at, o)
	if err != nil {
		s.cfg.Log.Warn("functions do not see a Secret of Kubernetes", "secret", at.String(), "error", err)
		return s.cfg.Copies.Delete(at.Namespace, at.Name)
	}
	if err := s.cfg.Copies.Put(at.Namespace, at.Name, o.Data[key]); err != nil {
		delete(s.versions, at)
		return err
	}
	s.changed(at.Namespace, at.Name)
	return nil
}

func isOurs(m kube.Meta) bool {
	by := m.Labels[kube.LabelManaged]
	return by == kube.Managed || by == openFaaS
}

// keyOf returns the key of a Secret with the value that functions see: the Secret's name, or the
// only key that there is.
func keyOf(at kube.Secret, o kube.SecretObject) (string, error) {
	if _, ok := o.Data[at.Name]; ok {
		return at.Name, nil
	}
	if len(o.Data) == 1 {
		for key := range o.Data {
			return key, nil
		}
	}
	return "", fmt.Errorf("it has %d keys, want the key %q, or one key alone", len(o.Data), at.Name)
}

// List returns the names of a namespace's secrets, sorted.
func (s *Secrets) List(namespace string) ([]string, error) {
	if err := s.has(namespace); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.bad[namespace]; err != nil {
		return nil, fmt.Errorf("secrets of namespace %q: %w", namespace, err)
	}
	return s.cfg.Copies.List(namespace)
}

// has returns an error if there can be no secrets in a namespace.
func (s *Secrets) has(namespace string) error {
	if slices.Contains(s.cfg.Namespaces, namespace) {
		return nil
	}
	return &Refusal{http.StatusForbidden, fmt.Sprintf("namespace %q: %s", namespace, notUsed(s.cfg.Namespaces))}
}

// Put stores a new or existing secret. It refuses to change a Secret that belongs to somebody else.
func (s *Secrets) Put(ctx context.Context, namespace, name string, value []byte) (note string, err error) {
	if err := s.has(namespace); err != nil {
		return "", err
	}
	at := kube.Secret{Namespace: namespace, Name: name}
	o, err := s.cfg.Cluster.Secret(ctx, at)
	if kube.NotFound(err) {
		err = s.cfg.Cluster.CreateSecret(ctx, at, map[string]string{kube.LabelManaged: kube.Managed}, map[string][]byte{name: value})
		if kube.Conflict(err) {
			err = &Refusal{http.StatusConflict, fmt.Sprintf("secret %s was made by somebody else at the same time, try again", at)}
		}
	} else if err == nil {
		if err = s.mayChange(at, o); err == nil {
			key, none := keyOf(at, o)
			if none != nil {
				key = name
			}
			err = s.cfg.Cluster.SetValue(ctx, at, key, value)
		}
	}
	if err != nil {
		return "", asRefusal(err)
	}
	return "", s.refresh(ctx, at, "")
}

// Delete removes a secret. It is no error if the secret does not exist.
func (s *Secrets) Delete(ctx context.Context, namespace, name string) error {
	if err := s.has(namespace); err != nil {
		return err
	}
	at := kube.Secret{Namespace: namespace, Name: name}
	o, err := s.cfg.Cluster.Secret(ctx, at)
	if err == nil {
		if err = s.mayChange(at, o); err == nil {
			err = s.cfg.Cluster.DeleteSecret(ctx, at, o.Metadata.UID)
		}
	}
	if err != nil && !kube.NotFound(err) {
		return asRefusal(err)
	}
	return s.refresh(ctx, at, "")
}

// mayChange returns an error if a Secret belongs to somebody else.
func (s *Secrets) mayChange(at kube.Secret, o kube.SecretObject) error {
	if isOurs(o.Metadata) {
		return nil
	}
	return &Refusal{http.StatusConflict, fmt.Sprintf(
		"Secret %s of Kubernetes belongs to somebody else: it lacks the label %s with the value %s or %s; want another name, or the label",
		at, kube.LabelManaged, kube.Managed, openFaaS)}
}

// Refusal is an error that the request or the state of the cluster has caused.
type Refusal struct {
	Status int // of HTTP
	Text   string
}

// Error implements error.
func (r *Refusal) Error() string { return r.Text }

// HTTPStatus returns the status of the answer to a client.
func (r *Refusal) HTTPStatus() int { return r.Status }

// asRefusal returns an error of the API server in a form that clients get with its status, if the
// request is to blame.
func asRefusal(err error) error {
	var refused *kube.Refused
	if !errors.As(err, &refused) {
		return err
	}
	switch refused.Status {
	case http.StatusConflict, http.StatusRequestEntityTooLarge, http.StatusUnprocessableEntity:
		return &Refusal{refused.Status, err.Error()}
	}
	return err
}
