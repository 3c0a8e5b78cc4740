package provider

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Images knows which images can be run.
type Images interface {
	// Pin returns the digest of what image stands for now, which is then here and can be run; empty when only its name says
	// what is run. An error that is ErrImages says that this cannot be found out now; any other, why the image cannot be run:
	// what was got, what is wanted.
	Pin(ctx context.Context, image string) (digest string, err error)
}

// ErrImages says that an image cannot be had now, through no fault of the request: its registry does not answer, the disk is
// full. Deploys get 502, or 504 when it is a matter of time.
var ErrImages = errors.New("image not available now")

// State is what runs of a function.
type State struct {
	Replicas    int     // wanted
	Available   int     // ready for requests
	Invocations float64 // since it was deployed, as far as known
	Detail      string  // one line for the operator, such as why replicas do not start; empty: nothing to say
}

// Replica is one running copy of a function.
type Replica struct {
	Name     string
	Node     string
	State    string        // starting, ready or draining
	Hidden   bool          // its node is silent; it serves as long as its connection holds
	Path     string        // how it was started: fork, forkheap, map, cold or process; empty: not yet
	Phases   []Phase       // of its start, in order, as far as it has come
	Ready    time.Duration // from its order until it was ready; 0: not yet
	Answered time.Duration // from its order until its first answer; 0: not yet
}

// Phase is a part of a replica's start.
type Phase struct {
	Name string // order, load, fork or spawn, place, first inference
	Took time.Duration
}

// Usage is what a function's replicas use together.
type Usage struct {
	CPUMilli    float64 // thousandths of a core
	MemoryBytes float64
}

// Status knows what runs.
type Status interface {
	// State returns what runs of the function with this key; of an unknown one, the zero State.
	State(key string) State
	// Replicas returns its replicas, sorted by name.
	Replicas(key string) []Replica
	// Usage measures what its replicas use; false: it cannot be measured.
	Usage(key string) (Usage, bool)
}

// Scaler changes the number of replicas that a function has.
type Scaler interface {
	// Scale asks for this many replicas. It returns when the wish is accepted, not when they run.
	Scale(ctx context.Context, key string, replicas int) error
}

// Credentials are the user and password that the /system routes ask for.
type Credentials struct{ User, Password string }

// ReadCredentials reads the files basic-auth-user and basic-auth-password of a folder.
func ReadCredentials(dir string) (*Credentials, error) {
	var c Credentials
	var errs []error
	for _, f := range []struct {
		name string
		to   *string
	}{{"basic-auth-user", &c.User}, {"basic-auth-password", &c.Password}} {
		b, err := os.ReadFile(filepath.Join(dir, f.name))
		*f.to = strings.TrimSpace(string(b))
		if err == nil && *f.to == "" {
			err = fmt.Errorf("%s is empty, want a line of text", filepath.Join(dir, f.name))
		}
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("credentials: %w", err)
	}
	return &c, nil
}

// Config is what a [Provider] is made of. All fields but Credentials are needed.
type Config struct {
	Store       Store
	Registry    *Registry // opened on Store
	Images      Images
	Status      Status
	Scaler      Scaler
	Pinner      Pinner
	Secrets     Secrets
	Mounts      Mounts
	Logs        Logs
	Credentials *Credentials // nil: the /system routes ask for none
	Version     string       // of the program, for GET /system/info
	Log         *slog.Logger
}

// Provider is the management API.
type Provider struct {
	Config
	handler http.Handler
	change  chan struct{} // a token: who holds it may change the store
}

// New returns the management API.
func New(c Config) (*Provider, error) {
	if c.Store == nil || c.Registry == nil || c.Images == nil || c.Status == nil || c.Scaler == nil || c.Pinner == nil || c.Log == nil ||
		c.Secrets == nil || c.Mounts == nil || c.Logs == nil {
		return nil, errors.New("provider: a field of Config is nil, want all but Credentials")
	}
	if c.Credentials != nil && (c.Credentials.User == "" || c.Credentials.Password == "") {
		return nil, errors.New("provider: credentials with an empty user or password, want both")
	}
	p := &Provider{Config: c, change: make(chan struct{}, 1)}
	p.handler = p.routes()
	return p, nil
}

// ServeHTTP serves /system and /healthz, and 404 for all else.
func (p *Provider) ServeHTTP(w http.ResponseWriter, r *http.Request) { p.handler.ServeHTTP(w, r) }

func (p *Provider) routes() http.Handler {
	system := http.NewServeMux()
	system.HandleFunc("GET /system/functions", p.list)
	system.HandleFunc("POST /system/functions", p.deploy)
	system.HandleFunc("PUT /system/functions", p.update)
	system.HandleFunc("DELETE /system/functions", p.remove)
	system.HandleFunc("GET /system/function/{name}", p.describe)
	system.HandleFunc("GET /system/function/{name}/profile", p.showProfile)
	system.HandleFunc("PUT /system/function/{name}/profile", p.storeProfile)
	system.HandleFunc("PUT /system/function/{name}/pin", p.pin)
	system.HandleFunc("DELETE /system/function/{name}/pin", p.unpin)
	system.HandleFunc("POST /system/scale-function/{name}", p.scale)
	system.HandleFunc("GET /system/info", p.info)
	system.HandleFunc("GET /system/namespaces", p.namespaces)
	system.HandleFunc("GET /system/namespace/{name}", p.namespace)
	system.HandleFunc("GET /system/pipelines", p.listPipelines)
	system.HandleFunc("GET /system/pipelines/{name}", p.describePipeline)
	system.HandleFunc("POST /system/namespace/{$}", p.createNamespace)
	system.HandleFunc("POST /system/namespace/{name}", p.createNamespace)
	system.HandleFunc("PUT /system/namespace/{name}", p.updateNamespace)
	system.HandleFunc("DELETE /system/namespace/{name}", p.deleteNamespace)
	system.HandleFunc("GET /system/secrets", p.listSecrets)
	system.HandleFunc("POST /system/secrets", p.createSecret)
	system.HandleFunc("PUT /system/secrets", p.updateSecret)
	system.HandleFunc("DELETE /system/secrets", p.deleteSecret)
	system.HandleFunc("GET /system/logs", p.logs)

	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { writeText(w, http.StatusOK, "OK") })
	mux.Handle("/system/", p.Guard(system))
	return mux
}

// Guard lets through to h only who knows the credentials, if there are any, and no page of another origin that happens to
// be open in a browser on the operator's machine.
func (p *Provider) Guard(h http.Handler) http.Handler {
	guarded := http.NewCrossOriginProtection().Handler(h)
	if p.Credentials == nil {
		return guarded
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, password, _ := r.BasicAuth()
		if same(user, p.Credentials.User)&same(password, p.Credentials.Password) != 1 {
			w.Header().Set("WWW-Authenticate", `Basic realm="Restricted"`)
			writeText(w, http.StatusUnauthorized, "invalid credentials")
			return
		}
		guarded.ServeHTTP(w, r)
	})
}

// same compares in a time that depends on neither content nor length of want; 1: equal.
func same(got, want string) int {
	g, w := sha256.Sum256([]byte(got)), sha256.Sum256([]byte(want))
	return subtle.ConstantTimeCompare(g[:], w[:])
}

// changeTimeout bounds a change of the store, its coming back through the watch included.
const changeTimeout = 10 * time.Second

// changing runs f while nobody else in this process changes the store.
func (p *Provider) changing(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	select {
	case p.change <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("another change takes its time: %w", ctx.Err())
	}
	defer func() { <-p.change }()
	return f(ctx)
}
