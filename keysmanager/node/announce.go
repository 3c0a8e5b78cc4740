package node

import (
	"context"
	"encoding/json"
	"fmt"
	"time"
)

// claimTimeout is how long the holder of a name has to answer.
const claimTimeout = 2 * time.Second

// claimAgain is the pause between questions to the holder.
const claimAgain = 250 * time.Millisecond

// Run announces the node and takes orders until ctx ends. Then it announces that the node is gone.
// If the bus does not work yet, Run waits for it. If the bus fails later, Run continues. Run
// returns ErrTaken if another daemon has the node's name.
func (s *Server) Run(ctx context.Context) error {
	if err := s.claim(ctx); err != nil {
		return err
	}
	for kind, f := range map[string]func(string, string, []byte){
		kindInventory: func(_, _ string, data []byte) { s.handleRival(data) },
		kindOrder:     func(_, reply string, data []byte) { s.receive(reply, data) },
	} {
		stop, err := s.cfg.Bus.Listen(s.cfg.Me.Name, kind, f)
		if err != nil {
			return fmt.Errorf("node %q: %w", s.cfg.Me.Name, err)
		}
		defer stop()
	}
	every := time.NewTicker(s.cfg.Announce)
	defer every.Stop()
	said := ""
	for {
		said = announce(s, said)
		again := time.After(coalesce)
		for waiting := true; waiting; {
			changed := s.changed
			if again != nil {
				changed = nil // not so soon
			}
			select {
			case <-ctx.Done():
				inv := Inventory{V: Version, Identity: s.cfg.Me, Departure: Departure{Gone: true}}
				_ = s.send(kindInventory, inv)
				return nil
			case err := <-s.failed:
				return err
			case <-again:
				again = nil
			case <-changed:
				waiting = false
			case <-every.C:
				waiting = false
			}
		}
	}
}

// announce sends an announcement. It logs an error once: said is what it returned the time before.
func announce(s *Server, said string) string {
	err := s.send(kindInventory, s.inventory())
	if err == nil {
		return ""
	}
	if err.Error() != said {
		s.cfg.Log.Warn("failed to announce this node; trying again", "node", s.cfg.Me.Name, "error", err)
	}
	return err.Error()
}

// inventory is the next announcement.
func (s *Server) inventory() Inventory {
	inv := s.cfg.Worker.Inventory()
	inv.V, inv.Identity, inv.Address, inv.Knows, inv.OutputLost = Version, s.cfg.Me, s.cfg.Address, features(), s.out.dropped()
	if !s.cfg.Remote {
		inv.Socket = s.socket.path
	}
	if s.cfg.Items != nil {
		inv.Items = s.cfg.Items.Room()
	}
	s.holds.describe(inv.Replicas)
	s.mu.Lock()
	defer s.mu.Unlock()
	inv.Leaving, inv.Patient, inv.Events, inv.Epoch = s.leaving, s.patient, s.number, s.fence.highest
	return inv
}

// claim asks who has the node's name. It returns nil if nobody answers.
func (s *Server) claim(ctx context.Context) error {
	answers := make(chan Answer, 1)
	kind := kindAnswer + s.cfg.Me.ID
	stop, err := s.cfg.Bus.Listen(s.cfg.Me.Name, kind, func(_, _ string, data []byte) {
		var a Answer // of nobody: the zero one
		if len(data) > 0 {
			var err error
			if a, err = DecodeAnswer(data); err != nil || a.ID != s.cfg.Me.ID {
				return
			}
		}
		select {
		case answers <- a:
		default:
		}
	})
	if err != nil {
		return fmt.Errorf("node %q: %w", s.cfg.Me.Name, err)
	}
	defer stop()
	who, err := json.Marshal(Order{V: Version, ID: s.cfg.Me.ID, Kind: OrderWho, Within: claimTimeout})
	if err != nil {
		return err
	}
	again := time.NewTicker(claimAgain)
	defer again.Stop()
	var limit <-chan time.Time // from when the question could first be sent
	for {
		if err := s.cfg.Bus.Send(s.cfg.Me.Name, kindOrder, kind, who); err == nil && limit == nil {
			limit = time.After(claimTimeout)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case a := <-answers:
			if a.ID == "" {
				return nil
			}
			return s.taken(a.From)
		case <-limit:
			return nil
		case <-again.C:
		}
	}
}

// handleRival ends this daemon if another daemon that announces this node has the better right to
// the name. If this daemon has the better right, the other one ends.
func (s *Server) handleRival(data []byte) {
	inv, err := decodeAnnouncer(data)
	if err != nil || inv.ID == s.cfg.Me.ID || inv.Gone {
		return
	}
	if inv.before(s.cfg.Me) {
		s.fail(s.taken(inv.Identity))
	}
}

func (s *Server) taken(holder Identity) error {
	return fmt.Errorf("%w: %q is held by %s; choose another --name, or stop that one", ErrTaken, s.cfg.Me.Name, holder)
}
