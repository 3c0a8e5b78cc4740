package authority

import (
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/identity"
)

// Serve answers nodes and processes that join until stop is called. nodes and joins are their
// buses. cut closes the connections of revoked NATS users; it gets all of them, see RevokedUsers.
func (a *Authority) Serve(nodes, joins Bus, cut func(users map[string]time.Time) error) (stop func(), err error) {
	a.mu.Lock()
	a.nodes, a.cut = nodes, cut
	a.mu.Unlock()
	stop1, err1 := joins.Listen("", identity.KindJoin, func(id, reply string, data []byte) {
		a.handle(joins, id, reply, data, a.Join)
	})
	stop2, err2 := nodes.Listen("", identity.KindIdentity, func(name, reply string, data []byte) {
		a.handle(nodes, name, reply, data, a.Renew)
	})
	stop = func() {
		for _, stop := range []func(){stop1, stop2} {
			if stop != nil {
				stop()
			}
		}
	}
	if err := errors.Join(err1, err2); err != nil {
		stop()
		return nil, err
	}
	return stop, nil
}

// handle answers one message. The answer goes to a subject of its sender, and to no other.
func (a *Authority) handle(bus identity.Bus, about, reply string, data []byte, f func(string, identity.Ask) identity.Answer) {
	if !strings.HasPrefix(reply, identity.KindAnswer) {
		return
	}
	ask, err := identity.DecodeAsk(data)
	var answer identity.Answer
	if err == nil {
		answer = f(about, ask)
	} else {
		a.mu.Lock()
		answer = a.answer(about, answer, refusal(err.Error()), a.cfg.Now())
		a.mu.Unlock()
	}
	if answer.Error == failed && a.shared {
		return // NATS stores nothing now, for seconds; the node asks again
	}
	b, err := json.Marshal(answer)
	if err == nil {
		err = bus.Send(about, reply, "", b)
	}
	if err != nil {
		a.cfg.Log.Warn("failed to answer a node; it asks again", "node", ask.Name, "error", err)
	}
}

// TellAll sends all nodes the list of revoked certificates.
func (a *Authority) TellAll() {
	a.mu.Lock()
	bus, names := a.nodes, slices.Sorted(maps.Keys(a.state.Nodes))
	a.mu.Unlock()
	if bus == nil {
		return
	}
	for _, name := range names {
		a.tell(bus, name)
	}
}
