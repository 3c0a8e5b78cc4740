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
	"path"
	"path/filepath"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/internal/peer"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// Images checks which images can run.
type Images interface {
	// Pin returns the digest of the image that a name refers to now. The image is then local and
	// can run. The digest is empty if only the name identifies the image. An error that wraps
	// ErrImages means that Pin cannot check the image now. Any other error says why the image
	// cannot run: what was found, and what is required.
	Pin(ctx context.Context, image string) (digest string, err error)
	// Guess returns the program that an image probably runs if it is a folder, or was packed from
	// one. Other images name their program, and nothing is guessed. If several programs are
	// possible, the error names them.
	Guess(image, digest string) (Guess, error)
	// Stage reports whether a pinned image speaks the stage protocol.
	Stage(image, digest string) bool
	// Model checks what can be seen of a stage's model without loading it. The model is the one
	// that env names, else the image's own. The error says which file is wrong, and how.
	Model(image, digest string, env map[string]string) error

	// Program returns an error if replicas cannot see the program that a function's process names,
	// or a file that the program needs to run. It returns nil if they can, or if that is not known
	// here. An empty process means the process of the image.
	Program(image, digest, process string, env map[string]string) error
}

// Guess is the process of a function whose deployment names none.
type Guess struct {
	Process string `json:"process"`
	// A server: its mode is http unless the environment sets another one.
	HTTP bool   `json:"http,omitempty"`
	Why  string `json:"why"`
}

// ErrImages says that an image is not available now although the request is right, because its
// registry does not answer. Deploys get 502, or 504 after a timeout.
var ErrImages = errors.New("image not available now")

// State is the status of a function.
type State struct {
	Replicas  int // wanted replicas of the deployed revision
	Available int // replicas of the deployed revision that are ready for requests
	// calls to the function's own name and as a stage of pipelines, since the process started.
	Invocations float64
	Status      string  // ready, updating, failing or asleep, then details after a colon
	Failure     Failure // latest failure of a replica; zero: none known
}

// Failure describes a failure of a replica.
type Failure struct {
	At      time.Time
	Replica string
	// failed (it did not start), lost (it ended by itself) or stuck (a handler did not end).
	Kind  string
	Cause string
}

// Replica is one running copy of a function.
type Replica struct {
	Name   string
	Node   string
	State  string // starting, ready or draining
	Older  bool   // of a revision before the deployed one
	Hidden bool   // its node is silent; it serves as long as its connection lasts
	// How it was started: fork, forkheap, map, cold or process; empty: not yet.
	Path     string
	Phases   []node.Phase  // of its start, in order, as far as it has come
	Ready    time.Duration // from the order until it was ready; 0: not yet
	Answered time.Duration // from the order until its first answer; 0: not yet
}

// Usage is what a function's replicas use in total.
type Usage struct {
	CPUMilli    float64 // thousandths of a core
	MemoryBytes float64
}

// Status reports what runs.
type Status interface {
	// State returns the status of the function with this key, or the zero State if it is unknown.
	State(key pipeline.Key) State
	// Replicas returns the function's replicas, sorted by name.
	Replicas(key pipeline.Key) []Replica
	// Batch says which batch was chosen for the function from its profile, and why. It returns "" if
	// the function declares its batch, or before the first decision.
	Batch(key pipeline.Key) string
	// Usage measures what the function's replicas use. It returns false if that cannot be measured.
	Usage(key pipeline.Key) (Usage, bool)
}

// Room knows the capacity of the nodes.
type Room interface {
	// Lacking returns the resources of which no known node has enough for one replica of f, not
	// even an empty node. It returns nothing if a node could hold the replica, or while no node is
	// known.
	Lacking(f plan.Function) []plan.Lack
}

// Scaler changes the number of a function's replicas.
type Scaler interface {
	// Scale asks for a number of replicas. It returns when the request is accepted, before they
	// run.
	Scale(ctx context.Context, key pipeline.Key, replicas int) error
}

// Credentials are the user and password for the /system routes.
type Credentials struct{ User, Password string }

// ReadCredentials reads the files basic-auth-user and basic-auth-password in a folder.
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

// Config configures a [Provider]. All fields but Credentials and Proxies are required.
type Config struct {
	Store    Store
	Registry *Registry // opened on Store
	Images   Images
	Status   Status
	Scaler   Scaler
	Room     Room
	Pinner   Pinner
	Secrets  Secrets
	Mounts   Mounts
	Logs     Logs
	// returns why changes or async requests are refused now, or nil; required.
	Ready       func() error
	Credentials *Credentials // nil: the /system routes need none
	HostNetwork bool         // functions may use the machine's network
	// Names of the runtime classes that functions may ask for, sorted, and forms of the devices of CDI
	// that they may have: vendor.com/class=name, or * for the name.
	RuntimeClasses, CDIDevices []string
	Policies                   Policies // that entry stages may ask for
	// Containers that may wait for a function's next starts, on each node; 0: none.
	Spares int
	// proxies trusted to name the client, so that password guesses count per client.
	Proxies peer.Proxies
	Version string // of the program, for GET /system/info
	Log     *slog.Logger
}

// Policies are the names of the policies of each level, sorted.
type Policies struct{ Allocators, Routes []string }

// Provider is the management API.
type Provider struct {
	Config
	handler http.Handler
	change  chan struct{} // a token, which must be held to change the store
	guesses *guesses
	stored  uint64 // latest revision of a function in the store; guarded by the token

	secretChanges secretChanges
}

// New returns the management API.
func New(c Config) (*Provider, error) {
	if c.Store == nil || c.Registry == nil || c.Images == nil || c.Status == nil || c.Scaler == nil || c.Room == nil || c.Pinner == nil || c.Log == nil ||
		c.Secrets == nil || c.Mounts == nil || c.Logs == nil || c.Ready == nil {
		return nil, errors.New("provider: a field of Config is nil, want all fields but Credentials and Proxies set")
	}
	if c.Credentials != nil && (c.Credentials.User == "" || c.Credentials.Password == "") {
		return nil, errors.New("provider: credentials with an empty user or password, want both")
	}
	p := &Provider{Config: c, change: make(chan struct{}, 1), guesses: newGuesses(c.Log)}
	p.handler = p.routes()
	return p, nil
}

// ServeHTTP serves /system, /healthz and /readyz. It answers 404 to all other paths.
func (p *Provider) ServeHTTP(w http.ResponseWriter, r *http.Request) { p.handler.ServeHTTP(w, r) }

func (p *Provider) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /system/functions", p.list)
	mux.HandleFunc("POST /system/functions", p.deploy)
	mux.HandleFunc("PUT /system/functions", p.deploy)
	mux.HandleFunc("DELETE /system/functions", p.remove)
	mux.HandleFunc("GET /system/function/{name}", p.describe)
	mux.HandleFunc("GET /system/function/{name}/profile", p.showProfile)
	mux.HandleFunc("PUT /system/function/{name}/profile", p.storeProfile)
	mux.HandleFunc("GET /system/accuracy/{name}", accuracyAPI{p}.show)
	mux.HandleFunc("PUT /system/accuracy/{name}", accuracyAPI{p}.store)
	mux.HandleFunc("PUT /system/function/{name}/pin", p.pin)
	mux.HandleFunc("DELETE /system/function/{name}/pin", p.unpin)
	mux.HandleFunc("POST /system/scale-function/{name}", p.scale)
	mux.HandleFunc("GET /system/info", p.info)
	mux.HandleFunc("GET /system/namespaces", p.namespaces)
	mux.HandleFunc("GET /system/namespace/{name}", p.namespace)
	mux.HandleFunc("GET /system/pipelines", p.listPipelines)
	mux.HandleFunc("GET /system/pipelines/{name}", p.describePipeline)
	mux.HandleFunc("POST /system/namespace/{$}", p.createNamespace)
	mux.HandleFunc("POST /system/namespace/{name}", p.createNamespace)
	mux.HandleFunc("PUT /system/namespace/{name}", p.updateNamespace)
	mux.HandleFunc("DELETE /system/namespace/{name}", p.deleteNamespace)
	mux.HandleFunc("GET /system/secrets", p.listSecrets)
	mux.HandleFunc("POST /system/secrets", p.createSecret)
	mux.HandleFunc("PUT /system/secrets", p.updateSecret)
	mux.HandleFunc("DELETE /system/secrets", p.deleteSecret)
	mux.HandleFunc("GET /system/logs", p.logs)

	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { writeText(w, http.StatusOK, "OK") })
	mux.HandleFunc("GET /readyz", p.ready)
	return p.Guard(mux)
}

// ready answers 503 while some requests are refused. Unlike /healthz, it reports faults that a
// restart would not fix.
func (p *Provider) ready(w http.ResponseWriter, _ *http.Request) {
	if err := p.Ready(); err != nil { // not logged, because probes come every few seconds
		internal(w)
		w.Header().Set("Retry-After", "5")
		writeText(w, http.StatusServiceUnavailable, "degraded: "+err.Error())
		return
	}
	writeText(w, http.StatusOK, "OK")
}

// Guard protects /system and the paths below it, and no other paths. It requires the credentials,
// if there are any. It refuses requests from web pages of another origin, which may be open in the
// operator's browser. Guard must come before any mux, because a mux answers some paths, such as
// /system and //system/info, with a redirect.
func (p *Provider) Guard(h http.Handler) http.Handler { return p.guard(h, belowSystem, p.Proxies) }

// GuardInside is Guard for requests that functions send. It protects every path, and no function is
// a trusted proxy, whatever its address.
func (p *Provider) GuardInside(h http.Handler) http.Handler {
	return p.guard(h, func(string) bool { return true }, nil)
}

func (p *Provider) guard(h http.Handler, covers func(path string) bool, proxies peer.Proxies) http.Handler {
	guarded := http.NewCrossOriginProtection().Handler(h)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !covers(r.URL.Path):
			h.ServeHTTP(w, r)
		case p.Credentials == nil || p.knows(r):
			guarded.ServeHTTP(w, r)
		default:
			p.guesses.refuse(w, r, proxies.Client(r))
		}
	})
}

// belowSystem reports whether a path is /system or below it, as written or as a mux cleans it.
func belowSystem(urlPath string) bool {
	for _, p := range [...]string{urlPath, path.Clean("/" + urlPath)} {
		if rest, ok := strings.CutPrefix(p, "/system"); ok && (rest == "" || rest[0] == '/') {
			return true
		}
	}
	return false
}

// knows reports whether a request has the right credentials. Its time does not depend on what is
// wrong with them.
func (p *Provider) knows(r *http.Request) bool {
	user, password, _ := r.BasicAuth()
	return same(user, p.Credentials.User)&same(password, p.Credentials.Password) == 1
}

// same compares strings in a time that does not depend on the content or length of want; 1: equal.
func same(got, want string) int {
	g, w := sha256.Sum256([]byte(got)), sha256.Sum256([]byte(want))
	return subtle.ConstantTimeCompare(g[:], w[:])
}

// changeTimeout bounds a change of the store, including its return through the watch.
const changeTimeout = 10 * time.Second

// changing runs f while nobody else in this process changes the store.
func (p *Provider) changing(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, changeTimeout)
	defer cancel()
	select {
	case p.change <- struct{}{}:
	case <-ctx.Done():
		return fmt.Errorf("another change is still running, try again: %w", ctx.Err())
	}
	defer func() { <-p.change }()
	return f(ctx)
}
