package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// joinConfig says how a daemon reaches NATS.
type joinConfig struct {
	urls    string // with commas between
	ca      string // file that the servers' certificates are checked against; empty: the authority is
	token   string // text of a join token, or a file that has it
	outside bool   // the servers are of others, who decide who may connect
	// own checks the servers' certificates against ca, once validate has read ca; nil: there is no
	// such file.
	own *tls.Config
}

// validate reads ca, and reports invalid flags. listen is where the node's tunnel listens.
func (c *joinConfig) validate(listen string, bad func(flag string, got any, want string)) {
	if c.outside && listen != "" {
		bad("listen", listen, "--token in place of --nats-outside: certificates need `up --nats-listen`, or servers with the files of `stagecoach cluster init` and `up --cluster-key`")
	}
	if c.ca != "" {
		var err error
		if c.own, err = natsTLS(c.ca); err != nil {
			bad("nats-ca", err, "a file with certificates (PEM)")
		}
	}
}

// joining is how a daemon becomes a member of a cluster.
type joining struct {
	joinConfig
	name string // of the node
	dir  string // for its credentials
	log  *slog.Logger
}

// readToken reads the join token.
func (j joinConfig) readToken() (identity.Token, error) {
	text := j.token
	if !identity.IsToken(text) {
		b, err := os.ReadFile(j.token)
		if err != nil {
			return identity.Token{}, err
		}
		text = string(b)
	}
	t, err := identity.ParseToken(strings.TrimSpace(text))
	if err != nil && text != j.token {
		err = fmt.Errorf("%s: %w", j.token, err)
	}
	return t, err
}

// member makes the node a member of the cluster, unless it is one already. Without an answer, it
// tries until ctx ends.
func (j joining) member(ctx context.Context) (*identity.Member, error) {
	m, err := identity.OpenMember(identity.MemberConfig{Dir: j.dir, Name: j.name, Now: time.Now, NewUser: queue.NewUser, Log: j.log})
	if err != nil {
		return nil, err
	}
	token, noToken := j.readToken()
	if m.Joined() {
		if noToken != nil && !errors.Is(noToken, fs.ErrNotExist) {
			return nil, fmt.Errorf("--token: %w", noToken)
		}
		cause := ""
		if same, _ := m.JoinedWith(token); noToken == nil && !same {
			cause = fmt.Sprintf("the token is of cluster %s", token.Cluster())
		} else if err := queue.Probe(j.urls, j.access(m, nil)); errors.Is(err, queue.ErrRefused) {
			cause = err.Error()
		}
		if cause == "" {
			return m, nil
		}
		j.log.Warn("the node has to join again", "node", j.name, "cluster", m.Source().Me().Cluster, "cause", cause)
	}
	if noToken != nil {
		return nil, fmt.Errorf("--token: %w; node %q needs a token to join: `stagecoach node token` prints one, and `stagecoach up --nats-listen` writes one to its state folder", noToken, j.name)
	}
	return m, j.join(ctx, m, token)
}

// join joins with a token.
func (j joining) join(ctx context.Context, m *identity.Member, t identity.Token) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	a := queue.Bearer(t.User, cmp.Or(j.own, identity.NATSClient(t.CA, time.Now)))
	a.NoTLS = func(err error) { cancel(fmt.Errorf("%w: %w", errNotOurs, err)) }
	a.Refused = func(err error) {
		cancel(fmt.Errorf("the NATS server refuses the token: it has expired, or is of another control plane: %w", err))
	}
	nc, err := queue.Connect(j.urls, a, "join "+j.name, j.log)
	if err != nil {
		return err
	}
	defer nc.Close()
	if err := m.Join(ctx, queue.NewJoinLink(nc), t); err != nil {
		return err
	}
	j.log.Info("joined", "node", j.name, "cluster", t.Cluster(), "token", t.ID())
	return nil
}

// errNotOurs means that NATS servers do not know join tokens.
var errNotOurs = errors.New("the NATS servers let no node join with a token: they need the files that `stagecoach cluster init` writes, and the control planes --cluster-key; " +
	"a node on the machine of the control plane that leads can use --nats-outside in place of a token")

// access is the access of a member to NATS.
func (j joining) access(m *identity.Member, refused func(error)) queue.Access {
	seed, secured := m.NATS()
	return queue.Access{User: m.User, Seed: seed, TLS: cmp.Or(j.own, secured), Refused: refused}
}

// openMembership makes the daemon a member, and connects it. If the membership ends, so does run.
func (d *daemon) openMembership(ctx context.Context) (*queue.Link, error) {
	if d.cfg.join.outside { // who may connect is up to the cluster's operator
		nc, err := queue.Connect(d.cfg.join.urls, queue.Access{TLS: d.cfg.join.own}, "node "+d.cfg.node, d.log)
		if err != nil {
			return nil, err
		}
		d.onClose(nc.Close)
		return queue.NewLink(nc), nil
	}
	j := joining{d.cfg.join, d.cfg.node, filepath.Join(d.cfg.state, "identity"), d.log}
	m, err := j.member(ctx)
	if err != nil {
		return nil, err
	}
	d.source, d.expelled = m.Source(), make(chan error, 1)
	expel := func(err error) {
		select {
		case d.expelled <- err:
		default:
		}
	}
	nc, err := queue.Connect(d.cfg.join.urls, j.access(m, func(err error) {
		if errors.Is(err, queue.ErrRevoked) { // before Serve has read the list
			expel(m.Expelled())
			return
		}
		expel(fmt.Errorf("the control plane refuses the credentials of node %q: %w; to join again, start it with a token", d.cfg.node, err))
	}), "node "+d.cfg.node, d.log)
	if err != nil {
		return nil, err
	}
	d.onClose(nc.Close)
	link := queue.NewLink(nc)
	serve, cancel := context.WithCancel(context.Background())
	var served sync.WaitGroup
	served.Go(func() {
		err := m.Serve(serve, link, func() { _ = nc.ForceReconnect() }) // as the renewed user
		if err != nil {
			expel(err)
		}
	})
	d.onClose(func() { cancel(); served.Wait() })
	return link, nil
}
