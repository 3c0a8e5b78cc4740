package queue

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// Subjects of the system account of NATS.
const (
	claimsUpdate = "$SYS.REQ.CLAIMS.UPDATE" // replaces an account on all servers, which all answer
	serverStarts = "$SYS.SERVER.*.STATSZ"   // from each server: soon after its start, then each 10 s
)

// Times of claims.
const (
	claimsAnswer = 2 * time.Second // for all servers' answers
	claimsAgain  = time.Minute     // between two updates without a cause
	claimsSoon   = 2 * time.Second // until a second update after each
	serverGone   = 25 * time.Second
)

// claims keeps the account of all users up to date on the servers of a cluster. The account has the
// revoked users.
type claims struct {
	keys *Keys
	nc   *nats.Conn // as a user of the system account

	mu      sync.Mutex
	servers map[string]time.Time // by name, when they were heard
	started chan struct{}        // gets a value when a server has started
	known   map[string]bool      // ids of servers
}

// openClaims connects to the system account.
func (c *Cluster) openClaims() error {
	k := &claims{keys: c.cfg.Keys, servers: map[string]time.Time{}, known: map[string]bool{}, started: make(chan struct{}, 1)}
	var err error
	if k.nc, err = c.connect("claims", c.cfg.Keys.claims()); err != nil {
		return err
	}
	if _, err = k.nc.Subscribe(serverStarts, k.heard); err != nil {
		k.nc.Close()
		return fmt.Errorf("%s: %w", c, err)
	}
	c.claims = k
	return nil
}

// serverName is how a server says who it is.
type serverName struct {
	Name string `json:"name"`
	ID   string `json:"id"` // of its process
}

// heard notes that a server runs.
func (k *claims) heard(m *nats.Msg) {
	var is struct {
		Server serverName `json:"server"`
	}
	if json.Unmarshal(m.Data, &is) != nil || is.Server.ID == "" {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.servers[is.Server.Name] = time.Now()
	if k.known[is.Server.ID] {
		return
	}
	k.known[is.Server.ID] = true
	select {
	case k.started <- struct{}{}:
	default:
	}
}

// running returns the names of the servers that were heard lately.
func (k *claims) running() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.servers, func(_ string, at time.Time) bool { return time.Since(at) > serverGone })
	return slices.Sorted(maps.Keys(k.servers))
}

// Revoke refuses users from now on, and closes their connections, on all servers that run. The map
// is that of [Server.Revoke]. It is an error if no server has confirmed. A server that is away
// learns it when it is back, see FollowRevoked.
func (c *Cluster) Revoke(users map[string]time.Time) error {
	if c.claims == nil {
		return nil
	}
	missing, err := c.claims.update(users)
	if err != nil {
		return fmt.Errorf("revoke nats users: %s: %w", c, err)
	}
	if len(missing) > 0 {
		c.cfg.Log.Warn("servers of the NATS cluster have not confirmed which users are revoked; they are told again", "servers", strings.Join(missing, ", "))
	}
	return nil
}

// update replaces the account on all servers. It returns the servers that run and have not
// confirmed that. If none has, that is an error.
func (k *claims) update(users map[string]time.Time) (missing []string, err error) {
	_, token, err := k.keys.accountClaims(users)
	if err != nil {
		return nil, err
	}
	inbox := nats.NewInbox()
	answers, err := k.nc.SubscribeSync(inbox)
	if err != nil {
		return nil, err
	}
	defer func() { _ = answers.Unsubscribe() }() // fails if the connection is closed
	if err := k.nc.PublishRequest(claimsUpdate, inbox, []byte(token)); err != nil {
		return nil, err
	}
	var failed []error
	missing = k.running()
	most, confirmed := time.Now().Add(claimsAnswer), 0
	for {
		m, err := answers.NextMsg(time.Until(most))
		if err != nil {
			if confirmed == 0 {
				return nil, errors.Join(fmt.Errorf("no server has confirmed: %w", err), errors.Join(failed...))
			}
			return missing, nil
		}
		var a struct {
			Server serverName `json:"server"`
			Error  *struct {
				Description string `json:"description"`
			} `json:"error"`
		}
		if err := json.Unmarshal(m.Data, &a); err != nil {
			failed = append(failed, fmt.Errorf("an answer of %d bytes cannot be read: %w", len(m.Data), err))
			continue
		}
		if a.Error != nil {
			failed = append(failed, fmt.Errorf("server %s: %s", a.Server.Name, a.Error.Description))
			continue
		}
		confirmed++
		missing = slices.DeleteFunc(missing, func(name string) bool { return name == a.Server.Name })
		if len(missing) == 0 {
			return nil, nil
		}
	}
}

// FollowRevoked tells the servers which users are revoked until ctx ends: now, when a server has
// started, and once a minute. So a server that was away, or an update of an earlier control plane
// that comes late, lets revoked users in for a short time only.
func (c *Cluster) FollowRevoked(ctx context.Context, users func() map[string]time.Time) {
	if c.claims == nil {
		return
	}
	said := ""
	for wait := time.Duration(0); ; {
		select {
		case <-ctx.Done():
			return
		case <-c.claims.started:
			wait = claimsSoon // it may not know the others yet
		case <-time.After(wait):
			wait = claimsAgain
		}
		missing, err := c.claims.update(users())
		text := strings.Join(missing, ", ")
		if err != nil {
			text, wait = err.Error(), claimsSoon
		}
		if text != "" && text != said {
			c.cfg.Log.Warn("the NATS cluster does not confirm which users are revoked; it is told again", "cause", text)
		}
		said = text
	}
}
