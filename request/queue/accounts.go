package queue

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"
)

// trust makes a server accept users that the keys have signed, and no others.
func (k *Keys) trust(o *server.Options, revoked map[string]time.Time) error {
	operator, system, systemToken, err := k.operatorClaims()
	if err != nil {
		return fmt.Errorf("nats keys: %w", err)
	}
	_, account, err := k.accountClaims(revoked)
	if err != nil {
		return fmt.Errorf("nats keys: %w", err)
	}
	accounts := &server.MemAccResolver{}
	if err := errors.Join(accounts.Store(system, systemToken), accounts.Store(k.streams, account)); err != nil {
		return fmt.Errorf("nats keys: %w", err)
	}
	o.TrustedOperators, o.SystemAccount, o.AccountResolver = []*jwt.OperatorClaims{operator}, system, accounts
	return nil
}

// Revoke refuses users from now on, and closes their connections. The map has all revoked users by
// public key, with the time until which their tokens were signed: tokens that are signed later are
// accepted.
func (s *Server) Revoke(users map[string]time.Time) error {
	if s.keys == nil {
		return nil // it has no users
	}
	claims, token, err := s.keys.accountClaims(users)
	if err != nil {
		return fmt.Errorf("revoke nats users: %w", err)
	}
	account, err := s.ns.LookupAccount(s.keys.streams)
	if err == nil {
		err = s.ns.AccountResolver().Store(s.keys.streams, token)
	}
	if err != nil {
		return fmt.Errorf("revoke nats users: %w", err)
	}
	s.ns.UpdateAccountClaims(account, claims)
	return nil
}

// globalAccount is the account of a server without keys.
const globalAccount = "$G"

// moveStreams gives the streams in a folder to an account. They may belong to the account of other
// keys, because the keys were lost, or to that of a server without keys, which did not listen. The
// server keeps the streams of each account in a folder with the account's name.
func moveStreams(dir, account string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var from []string
	for _, e := range entries {
		name := e.Name()
		if e.IsDir() && (name == globalAccount || nkeys.IsValidPublicAccountKey(name)) && hasStreams(filepath.Join(dir, name)) {
			from = append(from, name)
		}
	}
	switch {
	case len(from) == 0 || len(from) == 1 && from[0] == account:
		return nil
	case len(from) > 1:
		return fmt.Errorf("%s has streams of the accounts %s, want one: remove the others", dir, strings.Join(from, ", "))
	}
	to := filepath.Join(dir, account)
	if err := os.RemoveAll(to); err != nil { // it has no streams
		return err
	}
	return os.Rename(filepath.Join(dir, from[0]), to)
}

func hasStreams(account string) bool {
	streams, err := os.ReadDir(filepath.Join(account, "streams"))
	return err == nil && len(streams) > 0
}
