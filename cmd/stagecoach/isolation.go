package main

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/sandbox"
	"github.com/stagecoach-serving/stagecoach/secret"
)

// IsolationConfig is who functions run as.
type IsolationConfig struct {
	UIDs string `yaml:"uids"` // FIRST-LAST, numbers of users and groups that nobody else on the machine has
}

// accounts are who functions run as that have no root of their own; where there are none, they are this process's user.
type accounts struct{ open *sandbox.Accounts }

func openAccounts(uids string, log *slog.Logger) (accounts, error) {
	var numbers sandbox.Range
	if err := numbers.UnmarshalText([]byte(uids)); err != nil {
		return accounts{}, fmt.Errorf("isolation.uids: %w", err)
	}
	a, err := sandbox.OpenAccounts(sandbox.RunFolder, numbers)
	if errors.Is(err, sandbox.ErrNoAccounts) {
		log.Info("functions are not isolated from each other", "why", err)
		return accounts{}, nil
	}
	return accounts{a}, err
}

func (a accounts) close() error {
	if a.open == nil {
		return nil
	}
	return a.open.Close()
}

// forKeys are the accounts as a KeysManager takes them.
func (a accounts) forKeys() keysmanager.Accounts {
	if a.open == nil {
		return nil
	}
	return a.open
}

// namedSecrets are the functions' secrets, and the groups of users that may read them.
type namedSecrets struct {
	*secret.Store
	groups secret.Groups // nil: there are none
}

// group is the group of a namespace's functions; 0: they have none.
func (s namedSecrets) group(namespace string) int {
	if s.groups == nil {
		return 0
	}
	gid, _ := s.groups(namespace) // an error keeps the secrets from being mounted, which is told then
	return gid
}

// namespaceGroup is that of a namespace of this state folder: others have namespaces of the same name.
func (u *up) namespaceGroup(namespace string) (int, error) {
	state, err := filepath.Abs(u.cfg.State)
	if err != nil {
		return 0, err
	}
	return u.accounts.open.Group(namespace + " of " + state)
}

// openSecrets opens the secrets. Their copies lie where functions can reach them whom others keep from our state folder.
func (u *up) openSecrets() error {
	var err error
	if u.accounts.open == nil {
		u.secrets.Store, err = secret.Open(u.cfg.State)
		return err
	}
	state, err := filepath.Abs(u.cfg.State)
	if err != nil {
		return err
	}
	sum := sha256.Sum256([]byte(state))
	u.secrets.groups = u.namespaceGroup
	u.secrets.Store, err = secret.OpenShared(u.cfg.State, filepath.Join(sandbox.RunFolder, "secrets-"+hex.EncodeToString(sum[:8])), u.secrets.groups)
	return err
}
