package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/secret/copies"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// secretBucket is the KV bucket with the names, the versions and the keyed hashes of secrets.
const secretBucket = "secrets"

// secretGate keeps a process that lacks secrets from leading.
type secretGate struct {
	kube     kubeParts
	controls *controls                     // nil: NATS is inside
	copies   atomic.Pointer[copies.Copies] // nil: secrets are not copied
	standing sync.Mutex                    // guards passive, and the lease until it is set
	passive  bool                          // this process lacks secrets, and does not take the lease
}

// openSecretCopies begins to exchange secrets with the other control planes. Without a cluster key,
// control planes cannot prove to each other who they are, and secrets stay where they are. With
// NATS inside, there are no others.
func openSecretCopies(ctx context.Context, u *up) error {
	followKube(u)
	if !u.leading.outside() || u.leading.kube.secrets != nil { // Kubernetes has them for all
		return nil
	}
	if u.nodes.shared == nil {
		u.log.Warn("secrets are on the disk of this control plane alone: without a cluster key (--cluster-key), control planes do not send them to each other")
		return nil
	}
	nc, err := u.nats.Connect("secrets")
	if err != nil {
		return err
	}
	u.onClose(func() error { nc.Close(); return nil })
	kv, err := queue.OpenKV(ctx, nc, u.nats.Disk(), secretBucket)
	if err != nil {
		return err
	}
	sums := u.nodes.shared.key.Derive("hashes of secrets")
	source := u.nodes.authority.Source()
	c, err := copies.Open(ctx, copies.Config{
		Store: u.secrets, File: filepath.Join(u.cfg.State, "secret-versions.json"), List: ownErrors{kv, copies.ErrNone, copies.ErrConflict}, Key: sums[:],
		Peers: u.leading.controls.peers, Dial: func(ctx context.Context, p copies.Peer) (net.Conn, error) { return dialPlane(ctx, source, p) },
		Stored: func(namespace, name string) { showSecret(u, namespace, name) }, Changed: u.leading.lacksChanged, Leads: u.leading.acts, Log: u.log,
	})
	if err != nil {
		return err
	}
	u.onClose(func() error { c.Close(); return nil })
	u.leading.copies.Store(c)
	return servePlanes(u, source, c.Handler())
}

// planeTimeout bounds the handshake between two control planes.
const planeTimeout = 5 * time.Second

// dialPlane connects to another control plane, and to nobody else.
func dialPlane(ctx context.Context, source identity.Source, p copies.Peer) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, planeTimeout)
	defer cancel()
	to := identity.Name{Cluster: source.Me().Cluster, Role: identity.Control, Name: p.Name}
	return (&tls.Dialer{Config: source.Client(to)}).DialContext(ctx, "tcp", p.Address)
}

// servePlanes listens for other control planes.
func servePlanes(u *up, source identity.Source, h http.Handler) error {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", u.cfg.Cluster.Listen)
	if err != nil {
		return fmt.Errorf("cluster.listen: %w", err)
	}
	address, err := u.cfg.advertised(l.Addr())
	if err != nil {
		return errors.Join(fmt.Errorf("cluster.advertise: %w", err), l.Close())
	}
	c := u.leading.controls
	c.mu.Lock()
	c.address = address
	c.mu.Unlock()
	srv := &http.Server{
		Handler: ofPlanes(h), ReadHeaderTimeout: planeTimeout, ReadTimeout: 30 * time.Second, IdleTimeout: planeTimeout,
		ErrorLog: slog.NewLogLogger(u.log.Handler(), slog.LevelDebug),
		// The configuration follows renewals and revocations.
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return source.Server(), nil }},
	}
	u.background(func(context.Context) error {
		if err := srv.ServeTLS(l, "", ""); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	u.onClose(srv.Close)
	u.log.Info("other control planes reach this one", "address", address)
	return nil
}

// ofPlanes refuses requests of nodes, which have certificates of the same cluster.
func ofPlanes(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS == nil {
			http.Error(w, "no TLS", http.StatusForbidden)
			return
		}
		peer, err := identity.PeerOf(*r.TLS)
		if err == nil && peer.Role != identity.Control {
			err = fmt.Errorf("%v is no control plane", peer)
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// advertised returns the address at which other control planes reach a listener: as configured, or
// on the address from which NATS is reached.
func (c *Config) advertised(l net.Addr) (string, error) {
	if c.Cluster.Advertise != "" {
		return c.Cluster.Advertise, nil
	}
	host, port, err := net.SplitHostPort(l.String())
	if err != nil {
		return "", err
	}
	if ip := net.ParseIP(host); ip != nil && !ip.IsUnspecified() {
		return l.String(), nil
	}
	server, err := url.Parse(c.NATS.URLs[0])
	if err != nil {
		return "", err
	}
	at := server.Host
	if server.Port() == "" {
		at = net.JoinHostPort(server.Hostname(), "4222")
	}
	probe, err := net.Dial("udp", at) //nolint:noctx // sends nothing
	if err != nil {
		return "", err
	}
	defer probe.Close()
	if host, _, err = net.SplitHostPort(probe.LocalAddr().String()); err != nil {
		return "", err
	}
	return net.JoinHostPort(host, port), nil
}

// lacks returns the secrets that this process lacks.
func (g *secretGate) lacks() []string {
	if c := g.copies.Load(); c != nil {
		return c.Lacking()
	}
	return nil
}

// mayLead reports whether this process has all secrets, or was told to lead without them.
func (l *leading) mayLead(lacking []string) bool {
	return len(lacking) == 0 || l.u.cfg.Cluster.LeadWithoutSecrets
}

// lacksChanged makes this process stand by while it lacks secrets.
func (l *leading) lacksChanged(lacking []string) {
	shown := lacking[:min(len(lacking), lacksTold)]
	switch {
	case len(lacking) == 0:
		l.u.log.Info("this control plane has all secrets")
	case l.u.cfg.Cluster.LeadWithoutSecrets:
		l.u.log.Warn("this control plane lacks secrets, and may lead all the same; functions that name them do not start", "secrets", shown, "all", len(lacking))
	default:
		l.u.log.Warn("this control plane lacks secrets, and does not take the lead before it has them from another one; "+
			"if no other one is left, --lead-without-secrets has it lead", "secrets", shown, "all", len(lacking))
	}
	l.standing.Lock()
	defer l.standing.Unlock()
	l.passive = !l.mayLead(lacking)
	if l.lease != nil {
		l.lease.SetPassive(l.passive)
	}
}

// why returns why this process does not lead, for clients that find no leader; empty: it could.
func (l *leading) why() string {
	if is := l.controls.self(); is.Lacking > 0 && !l.mayLead(is.Lacks) {
		return "this one does not lead because " + lacksText(is)
	}
	return ""
}

// showSecret shows functions a secret that has changed without a call of the API.
func showSecret(u *up, namespace, name string) {
	u.log.Info("a secret has changed", "secret", name, "namespace", namespace)
	for _, f := range u.registry.Functions() {
		if f.Declared.Namespace != namespace || !slices.Contains(f.Deployment.Secrets, name) {
			continue
		}
		if u.deployedFunctions().missing(f.Key) != nil {
			continue // another one is missing
		}
		if err := u.secrets.Mount(namespace, f.Declared.Name, f.Deployment.Secrets); err != nil {
			u.log.Error("function does not see its secrets", "function", f.Key, "error", err)
		}
	}
	if u.nodes.far != nil {
		u.nodes.resend(namespace, name)
	}
}

// missing returns an error if this process lacks a secret that a function names.
func (d deployed) missing(key pipeline.Key) error {
	f, there := d.Function(key)
	if !there {
		return nil
	}
	has, err := d.secrets.List(f.Declared.Namespace)
	if err != nil {
		return err
	}
	var lacks []string
	for _, name := range f.Deployment.Secrets {
		if !slices.Contains(has, name) {
			lacks = append(lacks, name)
		}
	}
	if len(lacks) == 0 {
		return nil
	}
	return fmt.Errorf("the control plane lacks the secrets %s of namespace %q: create them again (faas-cli secret create), or bring back a control plane that has them",
		strings.Join(lacks, ", "), f.Declared.Namespace)
}

// withSecrets returns an error if a replica would start without its secrets. It shows a function
// its secrets if they came after the start of this process.
func (d deployed) withSecrets(spec node.Spec) error {
	key := pipeline.ParseKey(spec.Function)
	if spec.Secrets == "" {
		return nil
	}
	if err := d.missing(key); err != nil {
		return err
	}
	f, _ := d.Function(key) // if it was removed meanwhile, it names none
	for _, name := range f.Deployment.Secrets {
		if !there(filepath.Join(spec.Secrets, name)) {
			return d.secrets.Mount(f.Declared.Namespace, f.Declared.Name, f.Deployment.Secrets)
		}
	}
	return nil
}

// copiedSecrets implements provider.Secrets: changes reach nodes on other machines, and the other
// control planes.
type copiedSecrets struct {
	spreadSecrets
	leading *leading
}

// secretsAPI returns the secrets that the API changes.
func secretsAPI(u *up) provider.Secrets {
	if k := u.leading.kube.secrets; k != nil {
		return k
	}
	return copiedSecrets{spreadSecrets{u.secrets, u.nodes}, u.leading}
}

// Put implements provider.Secrets.
func (s copiedSecrets) Put(ctx context.Context, namespace, name string, value []byte) (note string, err error) {
	c := s.leading.copies.Load()
	if c == nil {
		return "", s.spreadSecrets.Put(namespace, name, value)
	}
	if _, err := s.leading.epoch(); err != nil {
		return "", err
	}
	have, alive, err := c.Put(ctx, namespace, name, value)
	if err != nil {
		return "", err
	}
	s.spread(namespace, name)
	switch {
	case alive == 0:
		note = "no other control plane is alive: it is on the disk of this one alone"
	case have == 0:
		note = fmt.Sprintf("none of %d other control planes has taken it yet: it is on the disk of this one alone", alive)
	}
	return note, nil
}

// Delete implements provider.Secrets.
func (s copiedSecrets) Delete(ctx context.Context, namespace, name string) error {
	c := s.leading.copies.Load()
	if c == nil {
		return s.Store.Delete(namespace, name)
	}
	if _, err := s.leading.epoch(); err != nil {
		return err
	}
	return c.Delete(ctx, namespace, name)
}
