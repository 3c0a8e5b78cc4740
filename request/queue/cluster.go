package queue

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// MinServer is the oldest release of nats-server that a [Cluster] may have.
const MinServer = "2.12.0"

// ClusterConfig configures a Cluster. Only URLs and Log are required.
type ClusterConfig struct {
	URLs      []string // of its servers, such as nats://a:4222
	Creds     string   // file with credentials: a JWT and its key
	CA        string   // file with the certificates that servers' certificates are checked against
	Cert, Key string   // files with the client's certificate and key
	// Keys have signed the users of the cluster. Connections are those of a control plane then, and
	// Creds is not used. nil: others decide who may connect.
	Keys *Keys
	TLS  *tls.Config // for the servers' certificates, in place of CA, Cert and Key
	// Replicas is the number of servers that keep each stream. 0: three, or one if the cluster has
	// fewer than three servers.
	Replicas int
	// Wait is how long OpenCluster waits for the first server that answers.
	Wait time.Duration
	Log  *slog.Logger
}

// access returns how a control plane connects.
func (c ClusterConfig) access() Access {
	if c.Keys == nil {
		return Access{}
	}
	return c.Keys.Control()
}

// Dial connects once: the connection does not reconnect, so no message is lost unnoticed. Unlike
// OpenCluster, it does not check the servers.
func (c ClusterConfig) Dial(name string) (*nats.Conn, error) {
	nc, err := dial(strings.Join(c.URLs, ","), append(c.options(name, c.access()), nats.NoReconnect())...)
	if err != nil {
		return nil, fmt.Errorf("connect to %s: %w", strings.Join(c.URLs, ","), classified(err))
	}
	return nc, nil
}

// options returns the options of a connection.
func (c ClusterConfig) options(name string, a Access) []nats.Option {
	o := []nats.Option{
		nats.Name(name), nats.Timeout(2 * time.Second), nats.FlusherTimeout(2 * time.Second),
		nats.PingInterval(2 * time.Second), nats.MaxPingsOutstanding(2),
	}
	if a.TLS = c.TLS; c.Keys != nil {
		return append(o, a.options()...)
	}
	if c.Creds != "" {
		o = append(o, nats.UserCredentials(c.Creds))
	}
	if c.CA != "" {
		o = append(o, nats.RootCAs(c.CA))
	}
	if c.Cert != "" {
		o = append(o, nats.ClientCert(c.Cert, c.Key))
	}
	return o
}

// Cluster is a cluster of nats-servers that other processes run.
type Cluster struct {
	cfg      ClusterConfig
	nc       *nats.Conn // for checks of the streams
	js       jetstream.JetStream
	disk     *Disk
	claims   *claims // nil: others decide who may connect
	replicas int
	unwatch  func() // stops the goroutine that checks the streams, and waits for it

	mu      sync.Mutex
	streams map[string]int // streams that are checked, and how many checks in a row have failed
}

// OpenCluster connects to a cluster. It fails if no server can be reached, or if a server is older
// than [MinServer]. Servers that cannot be reached are checked when a connection reaches them.
func OpenCluster(ctx context.Context, cfg ClusterConfig) (*Cluster, error) {
	c := &Cluster{cfg: cfg, streams: map[string]int{}}
	c.disk = newDisk(c, "", cfg.Log)
	c.disk.cluster = c
	if err := c.awaitServers(ctx); err != nil {
		return nil, err
	}
	var err error
	if c.nc, err = c.Connect("streams"); err != nil {
		return nil, err
	}
	if cfg.Keys != nil {
		err = c.openClaims()
	}
	if err == nil {
		c.js, err = jetstream.New(c.nc)
	}
	if err == nil {
		c.replicas, err = c.choose(ctx)
	}
	if err != nil {
		c.closeConns()
		return nil, fmt.Errorf("%s: %w", c, err)
	}
	c.disk.replicas = c.replicas
	watch, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { c.disk.watch(watch) })
	c.unwatch = func() { cancel(); wg.Wait() }
	return c, nil
}

// String names the cluster in messages.
func (c *Cluster) String() string { return "the NATS cluster " + c.URL() }

// Disk implements [Broker].
func (c *Cluster) Disk() *Disk { return c.disk }

// URL implements [Broker].
func (c *Cluster) URL() string { return strings.Join(c.cfg.URLs, ",") }

// Replicas returns how many servers keep each stream.
func (c *Cluster) Replicas() int { return c.replicas }

// Close implements [Broker].
func (c *Cluster) Close() {
	c.unwatch()
	c.closeConns()
}

func (c *Cluster) closeConns() {
	c.nc.Close()
	if c.claims != nil {
		c.claims.nc.Close()
	}
}

// errAway means that no server of a cluster answers.
var errAway = errors.New("queue: no server of the NATS cluster can be reached")

// awaitServers checks the servers, and waits for the first one that answers.
func (c *Cluster) awaitServers(ctx context.Context) error {
	begin, told := time.Now(), false
	for {
		err := c.checkServers()
		left := c.cfg.Wait - time.Since(begin)
		if !errors.Is(err, errAway) || left <= 0 {
			return err
		}
		if !told {
			c.cfg.Log.Warn("waiting for NATS", "most", c.cfg.Wait, "error", err)
			told = true
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, context.Cause(ctx))
		case <-time.After(min(left, startAgain)):
		}
	}
}

// checkServers connects to all servers at the same time, and returns an error if one is too old, or
// if none answers.
func (c *Cluster) checkServers() error {
	old, away := make([]error, len(c.cfg.URLs)), make([]error, len(c.cfg.URLs))
	var all sync.WaitGroup
	for i, url := range c.cfg.URLs {
		all.Go(func() {
			nc, err := dial(url, append(c.cfg.options("check", c.cfg.access()), nats.NoReconnect())...)
			if err != nil {
				away[i] = fmt.Errorf("%s: %w", url, classified(err))
				return
			}
			old[i] = tooOld(url, nc.ConnectedServerVersion())
			nc.Close()
		})
	}
	all.Wait()
	if err := errors.Join(old...); err != nil {
		return err
	}
	if !slices.Contains(away, nil) {
		return fmt.Errorf("%w: %w", errAway, errors.Join(away...))
	}
	for _, err := range away {
		if err != nil {
			c.cfg.Log.Warn("a server of the NATS cluster cannot be reached now", "error", err)
		}
	}
	return nil
}

// tooOld returns an error if a server's release is older than MinServer.
func tooOld(url, version string) error {
	var got, want [3]int
	_, _ = fmt.Sscanf(MinServer, "%d.%d.%d", &want[0], &want[1], &want[2])
	// A release that cannot be read counts as old.
	_, _ = fmt.Sscanf(version, "%d.%d.%d", &got[0], &got[1], &got[2])
	for i := range got {
		if got[i] != want[i] {
			if got[i] > want[i] {
				return nil
			}
			return fmt.Errorf("nats-server at %s is version %s, want %s or later", url, version, MinServer)
		}
	}
	return nil
}

// Connect implements [Broker]. The connection reconnects for ever. While no server can be reached,
// sending fails, and subscriptions are kept.
func (c *Cluster) Connect(name string) (*nats.Conn, error) { return c.connect(name, c.cfg.access()) }

func (c *Cluster) connect(name string, a Access) (*nats.Conn, error) {
	log := c.cfg.Log.With("connection", name)
	nc, err := dial(c.URL(), append(c.cfg.options(name, a),
		nats.MaxReconnects(-1), nats.ReconnectWait(reconnectWait), nats.ReconnectJitter(0, 0), nats.ReconnectBufSize(-1),
		nats.IgnoreAuthErrorAbort(), nats.NoCallbacksAfterClientClose(),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			log.Warn("nats: connection lost", "error", err)
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) {
			log.Info("nats: connected", "url", nc.ConnectedUrlRedacted())
			if err := tooOld(nc.ConnectedUrlRedacted(), nc.ConnectedServerVersion()); err != nil {
				log.Error("nats: another server is tried", "error", err)
				_ = nc.ForceReconnect() // fails if the connection is closed
			}
		}),
		nats.ErrorHandler(func(_ *nats.Conn, sub *nats.Subscription, err error) {
			subject := ""
			if sub != nil {
				subject = sub.Subject
			}
			log.Error("nats", "subject", subject, "error", err)
		}))...)
	if err != nil {
		return nil, fmt.Errorf("connect %s to %s: %w", name, c, err)
	}
	return nc, nil
}

// dialTries is how often a process connects to servers that do not answer in time. On a busy
// machine, one try may not be enough.
const dialTries = 3

func dial(url string, options ...nats.Option) (nc *nats.Conn, err error) {
	for range dialTries {
		var late net.Error
		if nc, err = nats.Connect(url, options...); err == nil || !errors.Is(err, nats.ErrTimeout) && !(errors.As(err, &late) && late.Timeout()) {
			break
		}
	}
	return nc, err
}

// JetStream's codes for a cluster that has too few servers.
const (
	errNoPeers      = 10005 // too few servers with room
	errNotClustered = 10074
	errNoQuorum     = 10008
)

// Bounds of the start.
const (
	clusterReady = 30 * time.Second       // until JetStream has a leader
	peersWait    = 10 * time.Second       // until all servers have found each other
	startAgain   = 200 * time.Millisecond // between two attempts
)

// choose returns how many servers keep each stream. It creates the bucket that only says so.
func (c *Cluster) choose(ctx context.Context) (int, error) {
	if n := c.cfg.Replicas; n > 0 {
		if err := c.mark(ctx, n); err != nil {
			return 0, fmt.Errorf("nats.replicas: %d servers cannot keep a stream: %w", n, err)
		}
		return n, nil
	}
	err := c.mark(ctx, 3)
	if err == nil {
		return 3, nil
	}
	var api *jetstream.APIError
	if !errors.As(err, &api) || api.ErrorCode != errNoPeers && api.ErrorCode != errNotClustered {
		return 0, fmt.Errorf("open JetStream: %w", err)
	}
	// A bucket with three copies exists if a server is away only for now.
	if have, lookErr := replicasOf(ctx, c.js, "KV_"+markBucket); lookErr != nil || have > 1 {
		return have, lookErr
	}
	c.cfg.Log.Warn("streams are kept by one server only, because the NATS cluster has fewer than three; accepted requests are lost with that server's disk",
		"cluster", c.URL(), "cause", err)
	return 1, c.mark(ctx, 1)
}

// markBucket is a bucket without values. The number of its copies is that of new streams.
const markBucket = "replicas"

// mark creates or changes the bucket. It waits until the cluster is ready.
func (c *Cluster) mark(ctx context.Context, n int) error {
	for begun := time.Now(); ; {
		try, cancel := context.WithTimeout(ctx, streamTimeout)
		_, err := c.js.CreateOrUpdateKeyValue(try, jetstream.KeyValueConfig{Bucket: markBucket, Storage: jetstream.FileStorage, Replicas: n})
		cancel()
		limit := clusterReady
		var api *jetstream.APIError
		switch {
		case err == nil:
			return nil
		case errors.As(err, &api) && api.ErrorCode == errNoPeers:
			limit = peersWait
		case errors.As(err, &api) && api.ErrorCode != errNoQuorum:
			return err
		}
		if time.Since(begun) > limit {
			return err
		}
		select {
		case <-time.After(startAgain):
		case <-ctx.Done():
			return err
		}
	}
}

// replicasOf returns how many servers keep a stream; 0: it does not exist.
func replicasOf(ctx context.Context, js jetstream.JetStream, stream string) (int, error) {
	s, err := js.Stream(ctx, stream)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return s.CachedInfo().Config.Replicas, nil
}

// Bounds of the checks of streams.
const (
	streamTimeout = 2 * time.Second // of a stream's answer
	streamTries   = 2               // failed checks in a row, after which a stream is out of reach
)

// follow has a stream checked from now on.
func (c *Cluster) follow(stream string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.streams[stream] = 0
}

// writeError checks all streams at the same time. It returns why a stream takes no writes: it has
// no leader, or the connection is lost.
func (c *Cluster) writeError() error {
	if !c.nc.IsConnected() {
		return errors.New("no server is connected")
	}
	ctx, cancel := context.WithTimeout(context.Background(), streamTimeout)
	defer cancel()
	var wg sync.WaitGroup
	var failed error
	c.mu.Lock()
	for name := range c.streams {
		wg.Go(func() {
			err := c.leader(ctx, name)
			c.mu.Lock()
			defer c.mu.Unlock()
			c.streams[name]++
			if err == nil {
				c.streams[name] = 0
			} else if c.streams[name] >= streamTries {
				failed = fmt.Errorf("stream %s: %w", name, err)
			}
		})
	}
	c.mu.Unlock()
	wg.Wait()
	return failed
}

// leader returns an error if a stream has no leader, and so cannot store anything.
func (c *Cluster) leader(ctx context.Context, stream string) error {
	s, err := c.js.Stream(ctx, stream)
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, nats.ErrNoResponders), errors.Is(err, jetstream.ErrJetStreamNotEnabled):
		return fmt.Errorf("it has no leader, because too few servers run: %w", err)
	case err != nil:
		return err
	}
	if info := s.CachedInfo(); info.Cluster != nil && info.Cluster.Leader == "" {
		return errors.New("it has no leader, because too few servers run")
	}
	return nil
}

// reopen implements streams: a cluster's streams come back by themselves.
func (c *Cluster) reopen() (failed, missing error) { return c.writeError(), nil }

// Codes of JetStream's errors for writes that a cluster cannot store now.
var outOfService = map[jetstream.ErrorCode]bool{
	10002:       true, // the account's limit is reached
	errNoQuorum: true,
	10023:       true, // insufficient resources
	10028:       true, // memory
	10047:       true, // storage
}

// refuses reports whether an error of a write means that the cluster cannot store anything now. A
// full stream is no such error.
func (c *Cluster) refuses(err error) bool {
	var api *jetstream.APIError
	if !errors.As(err, &api) {
		return errors.Is(err, jetstream.ErrNoStreamResponse) || errors.Is(err, nats.ErrNoResponders)
	}
	return outOfService[api.ErrorCode] || api.ErrorCode == errStoreFailed && !strings.Contains(api.Description, "maximum")
}
