package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/control/cluster"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/secret"
)

// IsolationConfig configures the users and the network of functions.
type IsolationConfig struct {
	// FIRST-LAST: numbers of users and groups that nobody else on the machine has.
	UIDs string `yaml:"uids"`
	// Addresses of replicas, as a prefix that nobody else on the machine uses.
	Network     string `yaml:"network"`
	HostNetwork bool   `yaml:"hostNetwork"` // functions may ask for the machine's network
	// Configuration of the operator's CNI plugins, or a folder of some; empty: there are none.
	CNIConf   string `yaml:"cniConf"`
	CNIBinDir string `yaml:"cniBinDir"` // folders of these plugins, with colons between
}

// networks returns which networks functions get.
func (c IsolationConfig) networks() networkConfig {
	return networkConfig{cidr: c.Network, cni: c.CNIConf, plugins: c.CNIBinDir}
}

// addCNIFlags adds the flags of the operator's CNI plugins. The fields have the defaults.
func addCNIFlags(fs *flag.FlagSet, conf, dirs *string) {
	fs.StringVar(conf, "cni-conf", *conf, "file (.conflist or .conf) of the CNI plugins that connect functions, or a folder whose first file counts, such as /etc/cni/net.d; default: Stagecoach connects them")
	fs.StringVar(dirs, "cni-bin-dir", *dirs, "folder of the CNI plugins, or several with colons between")
}

// accounts are the users of processes that have no root of their own. If open is nil, they run as
// this process's user.
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
	if err == nil {
		if why := sandbox.HidesProcesses(); why != nil {
			log.Warn("functions see the command lines of all processes", "why", why)
		}
	}
	return accounts{a}, err
}

func (a accounts) close() error {
	if a.open == nil {
		return nil
	}
	return a.open.Close()
}

// forKeys returns the accounts in the KeysManager's type.
func (a accounts) forKeys() keysmanager.Accounts {
	if a.open == nil {
		return nil
	}
	return a.open
}

// secretsGroup returns the gid of the group that may read a set of secrets. Its members are the
// functions of the namespace that name exactly these secrets. Each state folder has its own groups,
// because namespaces of two state folders may have the same name.
func (u *up) secretsGroup(namespace string, names []string) (int, error) {
	state, err := filepath.Abs(u.cfg.State)
	if err != nil {
		return 0, err
	}
	return u.accounts.open.Group(fmt.Sprintf("%q of %q with %q", namespace, state, names))
}

// sweepEvery is the time between two searches for unused folders of secrets.
const sweepEvery = time.Minute

// sweepSecrets removes the secrets of earlier deploys, once their replicas have gone.
func (u *up) sweepSecrets(ctx context.Context) error {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
		if err := u.secrets.Sweep(u.secretsUsed); err != nil {
			u.log.Warn("unused secrets are not removed", "error", err)
		}
	}
}

// secretsUsed reports whether a replica may use a folder of a function's secrets.
func (u *up) secretsUsed(namespace, function, folder string) bool {
	key := pipeline.Key{Name: function, Namespace: namespace}
	f, _ := u.registry.Function(key) // an unknown function has revision 0, which no replica has
	return folder == u.secrets.MountPath(namespace, function, f.Deployment.Secrets) || hasEarlier(u.local.Replicas(key), f.Revision)
}

// hasEarlier reports whether any of the replicas are of another deploy than the one with this
// revision.
func hasEarlier(replicas []cluster.Replica, revision uint64) bool {
	return slices.ContainsFunc(replicas, func(r cluster.Replica) bool { return r.Revision != revision })
}

// openSecrets opens the secrets. If functions have accounts, the copies of secrets lie below
// sandbox.RunFolder, which is in memory on most machines. Otherwise they lie in the state folder.
func (u *up) openSecrets(ctx context.Context) error {
	err := openKube(u)
	if err != nil {
		return err
	}
	if u.cfg.Kubernetes.Secrets {
		return openKubeSecrets(ctx, u)
	}
	if u.accounts.open == nil {
		u.secrets, err = secret.Open(u.cfg.State)
		return err
	}
	state, err := filepath.Abs(u.cfg.State)
	if err != nil {
		return err
	}
	sum := sha256.Sum256([]byte(state))
	u.secrets, err = secret.OpenShared(u.cfg.State, filepath.Join(sandbox.RunFolder, "secrets-"+hex.EncodeToString(sum[:8])), u.secretsGroup)
	return err
}
