package authority

import (
	"maps"
	"slices"
	"time"
)

// everyUser stands for all NATS users among those that are revoked.
const everyUser = "*"

// Restored makes a state safe that was restored from a backup. Such a state does not know which
// nodes were revoked after the backup, and how often tokens were used. Restored makes all join
// tokens void. Unless keep is set, it revokes all nodes and all NATS users, including those that
// the state does not know. It returns the nodes that were in the state. No control plane may run
// meanwhile.
func (a *Authority) Restored(keep bool) (nodes []string, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := a.cfg.Now().UTC().Round(0)
	err = a.change(func(s *state) error {
		nodes = slices.Sorted(maps.Keys(s.Nodes))
		clear(s.Tokens)
		if keep {
			return nil
		}
		for name, m := range s.Nodes {
			s.expel(name, m, now)
			s.Names[name] = now
		}
		clear(s.Nodes)
		// A control plane that starts right after this has users that were signed after At.
		// Nobody knows how long the users are valid that the state does not know.
		s.Users[everyUser] = revokedUser{At: now.Add(-restoredAgo), Until: now.Add(caLifetime)}
		return nil
	})
	return nodes, err
}

// restoredAgo is how long before a restore the last revoked user may have been signed. No control
// plane has run since.
const restoredAgo = 2 * time.Second
