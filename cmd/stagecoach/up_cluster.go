package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// ClusterConfig configures what the control planes of a cluster share.
type ClusterConfig struct {
	// File with the cluster key of `stagecoach cluster init`; empty: the operator of the NATS cluster
	// decides who may connect, and nodes cannot join with tokens.
	Key string `yaml:"key"`
	// host:port where other control planes reach this one, to exchange secrets; without a port, one
	// that is free.
	Listen    string `yaml:"listen"`
	Advertise string `yaml:"advertise"` // host:port that they connect to; empty: that of Listen
	// This process leads even if it lacks secrets that no other control plane has any more.
	LeadWithoutSecrets bool `yaml:"leadWithoutSecrets"`
	// NAMESPACE/NAME of a Secret of Kubernetes, in which the leader keeps a join token; empty: none.
	JoinSecret string `yaml:"joinSecret"`
	// The leader drains nodes in pods whose machines are cordoned in Kubernetes, or go away soon.
	FollowCordons bool `yaml:"followCordons"`
}

func (c *ClusterConfig) addFlags(fs *flag.FlagSet) {
	fs.StringVar(&c.Key, "cluster-key", c.Key, "file with the cluster key of stagecoach cluster init, for a NATS cluster outside that nodes join with tokens")
	fs.StringVar(&c.Listen, "cluster-listen", c.Listen, "host:port where other control planes reach this one over TLS, to exchange secrets; port 0: one that is free")
	fs.StringVar(&c.Advertise, "cluster-advertise", c.Advertise, "host:port that other control planes connect to; default: that of --cluster-listen, on the address from which NATS is reached")
	fs.StringVar(&c.JoinSecret, "join-secret", c.JoinSecret, "NAMESPACE/NAME of a Secret of Kubernetes, in which the leader keeps a join token for pods of nodes; needs --cluster-key")
	fs.BoolVar(&c.FollowCordons, "follow-cordons", c.FollowCordons, "drain nodes in pods (keysmanager --pod) while their machines are cordoned in Kubernetes, or go away soon; needs --cluster-key")
	fs.BoolVar(&c.LeadWithoutSecrets, "lead-without-secrets", c.LeadWithoutSecrets, "lead even if this control plane lacks secrets, because no other one that has them comes back")
}

// validate reports the invalid fields of cluster.
func (c *ClusterConfig) validate(n *NATSConfig, bad func(path string, got any, want string)) {
	for path, address := range map[string]string{"listen": c.Listen, "advertise": c.Advertise} {
		if _, port, err := net.SplitHostPort(address); address != "" && (err != nil || port == "") {
			bad("cluster."+path, fmt.Sprintf("%q", address), "host:port, such as 10.0.0.7:7444")
		}
	}
	if c.LeadWithoutSecrets && c.Key == "" {
		bad("cluster.leadWithoutSecrets", true, "cluster.key too: without it, secrets are not copied, and nothing keeps a control plane from leading")
	}
	if _, err := kube.ParseSecret(c.JoinSecret); c.JoinSecret != "" && err != nil {
		bad("cluster.joinSecret", fmt.Sprintf("%q", c.JoinSecret), "NAMESPACE/NAME of a Secret")
	} else if c.JoinSecret != "" && c.Key == "" {
		bad("cluster.joinSecret", fmt.Sprintf("%q", c.JoinSecret), "cluster.key too: without it, there are no join tokens")
	}
	if c.FollowCordons && c.Key == "" {
		bad("cluster.followCordons", true, "cluster.key too: without it, nodes do not run in pods")
	}
	if c.Key == "" {
		return
	}
	if !n.outside() {
		bad("cluster.key", fmt.Sprintf("%q", c.Key), "nats.urls too: the servers of `stagecoach cluster init`")
	}
	if n.Creds != "" || n.Cert != "" {
		bad("cluster.key", fmt.Sprintf("%q", c.Key), "no nats.creds and nats.cert: the key is enough to connect")
	}
	if _, err := authority.ReadClusterKey(c.Key); err != nil {
		bad("cluster.key", err, "a file of `stagecoach cluster init`")
	}
}

// clusterKeys has the cluster key, and the keys of NATS that are derived from it.
type clusterKeys struct {
	key  authority.ClusterKey
	nats *queue.Keys // derived from it
}

// keys reads the cluster key. It returns nil if there is none.
func (c *ClusterConfig) keys() (*clusterKeys, error) {
	if c.Key == "" {
		return nil, nil
	}
	key, err := authority.ReadClusterKey(c.Key)
	if err != nil {
		return nil, err
	}
	keys, err := queue.DeriveKeys(key.Derive)
	if err != nil {
		return nil, err
	}
	return &clusterKeys{key, keys}, nil
}

// natsTLS returns a configuration that checks the certificates of NATS servers against a file.
func natsTLS(file string) (*tls.Config, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(b) {
		return nil, fmt.Errorf("%s: no certificate", file)
	}
	return &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}, nil
}

// outsideBroker connects to the NATS cluster outside. keys are nil without a cluster key.
func (c *Config) outsideBroker(ctx context.Context, cfg queue.ClusterConfig, keys *clusterKeys) (queue.Broker, error) {
	if keys == nil {
		b, err := queue.OpenCluster(ctx, cfg)
		if unknown := (x509.UnknownAuthorityError{}); errors.Is(err, queue.ErrRefused) || errors.As(err, &unknown) {
			err = fmt.Errorf("%w; servers with the files of `stagecoach cluster init` need --cluster-key, others --nats-creds or --nats-ca", err)
		}
		return b, err
	}
	if err := keys.access(&cfg); err != nil {
		return nil, err
	}
	b, err := queue.OpenCluster(ctx, cfg)
	return b, wrongKey(c.Cluster.Key, err)
}

// access sets the keys and the TLS configuration of cfg.
func (k *clusterKeys) access(cfg *queue.ClusterConfig) (err error) {
	cfg.Keys = k.nats
	if cfg.CA == "" {
		_, ca := k.key.CA()
		cfg.TLS = identity.NATSClient(identity.KeyHash(ca), time.Now)
	} else if cfg.TLS, err = natsTLS(cfg.CA); err != nil {
		return fmt.Errorf("nats.ca: %w", err)
	}
	return nil
}

// wrongKey explains an error of a connection that was made with the key in a file.
func wrongKey(file string, err error) error {
	if errors.Is(err, queue.ErrNoTLS) || errors.Is(err, queue.ErrRefused) || errors.Is(err, identity.ErrOtherCluster) {
		return fmt.Errorf("cluster key: %s is not the key of these NATS servers; copy the key that `stagecoach cluster init` has written with their files: %w", file, err)
	}
	return err
}

// ownErrors is a bucket that returns the errors of the package that uses it.
type ownErrors struct {
	*queue.KV

	none, conflict error
}

// Get is [queue.KV.Get] with none in place of queue.ErrNotFound.
func (b ownErrors) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	value, rev, err := b.KV.Get(ctx, key)
	if errors.Is(err, queue.ErrNotFound) {
		err = b.none
	}
	return value, rev, err
}

// Replace is [queue.KV.Replace] with conflict in place of queue.ErrConflict.
func (b ownErrors) Replace(ctx context.Context, key string, value []byte, rev uint64) (uint64, error) {
	rev, err := b.KV.Replace(ctx, key, value, rev)
	if errors.Is(err, queue.ErrConflict) {
		err = b.conflict
	}
	return rev, err
}

// openSharedAuthority opens the authority that the control planes of a cluster share, if there is a
// cluster key.
func openSharedAuthority(ctx context.Context, u *up) error {
	shared := u.nodes.shared
	if shared == nil {
		return nil
	}
	nc, err := u.nats.Connect("authority")
	if err != nil {
		return err
	}
	u.onClose(func() error { nc.Close(); return nil })
	kv, err := queue.OpenKV(ctx, nc, u.nats.Disk(), "authority")
	if err != nil {
		return err
	}
	u.nodes.authority, err = authority.Open(authority.Config{
		Shared: &authority.Shared{Key: shared.key, Store: ownErrors{kv, authority.ErrNone, authority.ErrConflict}}, Name: u.leading.me,
		Lifetime: u.cfg.NATS.Certificates, Now: time.Now, Users: shared.nats, Log: u.log,
	})
	if err != nil {
		return err
	}
	u.onClose(func() error { u.nodes.authority.Close(); return nil })
	return nil
}

// serveAuthority answers nodes that join or renew, until stop is called.
func serveAuthority(u *up) (stop func(), err error) {
	n := u.nodes
	if n.authority == nil {
		return func() {}, nil
	}
	cut, follow := func(map[string]time.Time) error { return nil }, func() {}
	switch broker := u.nats.(type) {
	case *queue.Server:
		cut = broker.Revoke
	case *queue.Cluster:
		cut = broker.Revoke
		ctx, cancel := context.WithCancel(context.Background())
		var following sync.WaitGroup
		following.Go(func() { broker.FollowRevoked(ctx, n.authority.RevokedUsers) })
		follow = func() { cancel(); following.Wait() }
	}
	joins := n.bus.Joins()
	stopServe, err := n.authority.Serve(n.bus, joins, cut)
	if err != nil {
		follow()
		return nil, err
	}
	unprobe, err := node.AnswerProbes(joins, n.self.Boot, version())
	if err != nil {
		stopServe()
		follow()
		return nil, err
	}
	unserve := func() { unprobe(); stopServe(); follow() }
	unkeep := n.joinSecret.start(n.authority)
	unfollow, err := followCordons(u)
	if err != nil {
		unkeep()
		unserve()
		return nil, err
	}
	return func() { unfollow(); unkeep(); unserve() }, nil
}

// followCordons asks the API server of Kubernetes which machines take no new work, until stop is
// called. Only the leader does this.
func followCordons(u *up) (stop func(), err error) {
	if !u.cfg.Cluster.FollowCordons {
		return func() {}, nil
	}
	client, err := kube.InPod()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	var following sync.WaitGroup
	following.Go(func() { u.nodes.cordons.machines.Follow(ctx, client.WatchMachines) })
	return func() { cancel(); following.Wait() }, nil
}

// Times of reachNodes.
const (
	reachTimeout = 10 * time.Second
	reachAgain   = 5 * time.Second // between two attempts to reach a node
)

// reachNodes keeps a connection with each node that has an address until stop is called, also while
// this control plane stands by. Over it, functions that speak HTTP meet requests of this process's
// gateway, because nodes do not dial control planes.
func reachNodes(u *up) (stop func(), err error) {
	f := u.nodes.far
	ctx, cancel := context.WithCancel(context.Background())
	var dials sync.WaitGroup
	last := map[string]time.Time{} // attempts; used by one goroutine alone
	f.noteApart()                  // this process has not heard all nodes yet
	unlisten, err := node.Addresses(u.nodes.bus, func(name string) bool {
		return f.tunnel.Connected(f.of(name))
	}, func(name, address string) {
		f.noteApart()
		if time.Since(last[name]) < reachAgain {
			return
		}
		if last[name] = time.Now(); len(last) > mostReached {
			clear(last)
		}
		dials.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, reachTimeout)
			defer cancel()
			if err := f.tunnel.Connect(ctx, f.of(name), address); err != nil {
				u.log.Debug("a node is not reached; it is tried again", "node", name, "address", address, "error", err)
			}
		})
	})
	return func() {
		if unlisten != nil {
			unlisten()
		}
		cancel()
		dials.Wait()
	}, err
}

// mostReached bounds how many attempts are remembered.
const mostReached = 16384

// apartFor is how long a node counts as not connected after an announcement that it has sent
// without a connection. The node's next announcement comes within a second.
const apartFor = 2500 * time.Millisecond

// began is when this process began. Times since then do not change with the wall clock.
var began = time.Now()

// noteApart records that a node has no connection with this process now.
func (f *farNodes) noteApart() { f.apart.Store(int64(time.Since(began))) }

// reachesAll reports whether all nodes on other machines that were heard lately are connected.
// Without such nodes, there is nothing to reach.
func (f *farNodes) reachesAll() bool {
	if f == nil {
		return false
	}
	at := time.Duration(f.apart.Load())
	return at == 0 || time.Since(began)-at > apartFor
}
