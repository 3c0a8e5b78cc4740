package tunnel

import (
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// Until returns until when a peer may stay connected after the certificate of its connection has
// expired, as far as a process knows.
type Until func(peer identity.Name) time.Time

// cutExpired ends connections whose peers' certificates have expired, until Close. A peer that has
// renewed its certificate since then stays.
func cutExpired(t *Tunnel) {
	tick := time.NewTicker(t.cfg.expiry)
	defer tick.Stop()
	for {
		select {
		case <-t.ctx.Done():
			return
		case <-tick.C:
		}
		t.mu.Lock()
		open := t.peers.sessions()
		t.mu.Unlock()
		now := time.Now()
		for _, s := range open {
			if now.After(s.certificate.NotAfter) && now.After(t.cfg.Until(s.peer)) {
				t.cfg.Log.Warn("connection of the tunnel is cut: the certificate of the other side has expired, and it has not renewed it",
					"peer", s.peer.String(), "expired", s.certificate.NotAfter)
				s.close()
			}
		}
	}
}
