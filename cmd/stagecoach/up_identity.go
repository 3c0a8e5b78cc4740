package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
	"github.com/stagecoach-serving/stagecoach/keysmanager/identity/authority"
	"github.com/stagecoach-serving/stagecoach/provider/admin"
	"github.com/stagecoach-serving/stagecoach/provider/schema"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// natsKeys reads the keys of NATS from a folder. The first call makes them.
func natsKeys(dir string) (*queue.Keys, error) {
	file := filepath.Join(dir, "nats.json")
	b, err := os.ReadFile(file)
	if err == nil {
		return queue.ParseKeys(b)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	keys, err := queue.NewKeys()
	if err != nil {
		return nil, err
	}
	if b, err = keys.MarshalText(); err == nil {
		err = identity.WriteSecret(file, b)
	}
	return keys, err
}

// tokenFile is the file with the join token for daemons of this machine.
func tokenFile(state string) string { return filepath.Join(state, "nats-token") }

// openAuthority opens the cluster's authority, if nodes may join, and configures NATS for them.
func (n *nodes) openAuthority(cfg Config, server *queue.ServerConfig) error {
	if cfg.NATS.Listen == "" {
		return nil
	}
	dir := filepath.Join(cfg.State, "identity")
	keys, err := natsKeys(dir)
	if err != nil {
		return fmt.Errorf("identity: %w", err)
	}
	n.authority, err = authority.Open(authority.Config{
		Dir: dir, Name: cfg.Node.Name, Lifetime: cfg.NATS.Certificates, Now: time.Now, Users: keys, Log: server.Log,
	})
	if err != nil {
		return err
	}
	if _, err := n.authority.LocalToken(tokenFile(cfg.State)); err != nil {
		return err
	}
	server.Listen, server.Keys, server.Revoked = cfg.NATS.Listen, keys, n.authority.RevokedUsers()
	server.TLS = identity.NATSServer(n.authority.Chain)
	return nil
}

// membership implements admin.Membership.
type membership struct{ *nodes }

// NewToken implements admin.Membership.
func (m membership) NewToken(r schema.JoinTokenOrder) (schema.JoinToken, error) {
	if m.authority == nil {
		return schema.JoinToken{}, admin.ErrNoAuthority
	}
	t, expires, err := m.authority.NewToken(authority.TokenRequest{Name: r.Name, TTL: time.Duration(r.TTL), Uses: r.Uses})
	if err != nil {
		return schema.JoinToken{}, err
	}
	return schema.JoinToken{Token: t.String(), ID: t.ID(), Cluster: t.Cluster(), Expires: expires}, nil
}

// Tokens implements admin.Membership.
func (m membership) Tokens() ([]schema.JoinTokenInfo, error) {
	if m.authority == nil {
		return nil, admin.ErrNoAuthority
	}
	out := []schema.JoinTokenInfo{}
	for _, t := range m.authority.Tokens() {
		out = append(out, schema.JoinTokenInfo{ID: t.ID, Name: t.Name, Created: t.Created, Expires: t.Expires, Uses: t.Uses, Used: t.Used, Local: t.Local})
	}
	return out, nil
}

// RevokeToken implements admin.Membership.
func (m membership) RevokeToken(id string) error {
	if m.authority == nil {
		return admin.ErrNoAuthority
	}
	err := m.authority.RevokeToken(id)
	if errors.Is(err, authority.ErrNoToken) {
		return fmt.Errorf("%w: %w", admin.ErrNoToken, err)
	}
	return err
}

// Revoke implements admin.Membership.
func (m membership) Revoke(name string) error {
	if m.authority == nil {
		return admin.ErrNoAuthority
	}
	err := m.authority.Revoke(name)
	if errors.Is(err, authority.ErrNoNode) {
		return fmt.Errorf("%w: %w", admin.ErrNoNode, err)
	}
	return err
}
