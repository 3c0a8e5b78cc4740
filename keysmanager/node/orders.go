package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// receive takes an order. It does not block.
func (s *Server) receive(reply string, data []byte) {
	o, err := DecodeOrder(data)
	if err != nil {
		var partly struct{ ID string }
		_ = json.Unmarshal(data, &partly)
		if isID("id", partly.ID) == nil {
			s.answer(reply, Answer{ID: partly.ID, Done: true, Error: err.Error()})
		}
		s.cfg.Log.Warn("order refused", "node", s.cfg.Me.Name, "error", err)
		return
	}
	done := Answer{ID: o.ID, Done: true}
	if o.Kind != OrderWho && o.To == s.cfg.Me.ID {
		if err := admit(s, o.Epoch); err != nil {
			refuseEpoch(s, reply, o, err)
			return
		}
	}
	switch {
	case o.Kind == OrderWho:
	case o.To != s.cfg.Me.ID:
		done.Error = fmt.Sprintf("the order is for an earlier daemon of node %q; this one started %s", s.cfg.Me.Name, s.cfg.Me.Started.Format(time.RFC3339))
	case o.Kind == OrderCancel:
		s.giveUp(o.Target)
	case o.Kind == OrderEvents:
		done.Events = s.since(o.Since)
	case o.Kind == OrderRefuse:
		s.fail(fmt.Errorf("%w: %s", ErrRefused, o.Cause))
	case o.Kind == OrderComplain:
		s.cfg.Log.Error("the control plane refuses this node's announcement; the node is not used until a later one is accepted", "node", s.cfg.Me.Name, "error", o.Cause)
	default:
		s.accept(reply, o)
		return
	}
	s.answer(reply, done)
}

// refuseEpoch answers an order of a control plane that another one has overtaken.
func refuseEpoch(s *Server, reply string, o Order, err error) {
	s.cfg.Log.Warn("order refused", "node", s.cfg.Me.Name, "order", o.Kind, "replica", o.Replica, "error", err)
	s.answer(reply, Answer{ID: o.ID, Done: true, Error: fmt.Sprintf("node %q: %v", s.cfg.Me.Name, err), Code: CodeOldEpoch})
}

// accept carries an order out, unless it has been or is being carried out.
func (s *Server) accept(reply string, o Order) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if a, ok := s.answers.Get(o.ID); ok {
		s.answer(reply, a)
		return
	}
	if t := s.running[o.ID]; t != nil {
		t.reply = reply
		s.answer(reply, Answer{ID: o.ID})
		return
	}
	refuse := ""
	if err := s.fence.check(o.Epoch); err != nil { // raised since the order was admitted
		refuseEpoch(s, reply, o, err)
		return
	}
	switch {
	case s.closed:
		refuse = "the daemon ends"
	case s.leaving && o.Kind == OrderStart:
		refuse = "the node is leaving"
	case len(s.running) >= maxRunning:
		refuse = fmt.Sprintf("%d orders are under way, want at most %d; try again", len(s.running), maxRunning)
	}
	if refuse != "" {
		s.answer(reply, Answer{ID: o.ID, Done: true, Error: fmt.Sprintf("node %q: %s", s.cfg.Me.Name, refuse)})
		return
	}
	ctx, cancel := context.WithTimeoutCause(s.ctx, o.Within, fmt.Errorf("order not carried out within %v", o.Within))
	ctx, giveUp := context.WithCancelCause(ctx)
	t := &task{cancel: giveUp, epoch: o.Epoch, reply: reply}
	s.running[o.ID] = t
	s.cfg.Log.Debug("order accepted", "node", s.cfg.Me.Name, "order", o.Kind, "replica", o.Replica, "epoch", o.Epoch)
	s.answer(reply, Answer{ID: o.ID})
	s.work.Go(func() {
		defer cancel()
		s.carryOut(ctx, o, t)
	})
}

// carryOut runs an order and answers it.
func (s *Server) carryOut(ctx context.Context, o Order, t *task) {
	a := Answer{ID: o.ID, Done: true}
	var started Started
	var err error
	if o.Kind == OrderStart {
		started, err = s.cfg.Worker.Start(ctx, o, func(p Phase) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.answer(t.reply, Answer{ID: o.ID, Phase: &p})
		})
		a.PID, a.Path, a.Phases = started.PID, started.Path, started.Phases
	} else {
		a.Bytes, err = s.cfg.Worker.Do(ctx, o)
	}
	if err != nil {
		a.Error, a.Code = err.Error(), s.cfg.Codes.of(err)
		errors.As(err, &a.Memory)
		var room interface{ NeedsMemory() int64 }
		if errors.As(err, &room) {
			a.Bytes = room.NeedsMemory()
		}
	}
	s.mu.Lock()
	delete(s.running, o.ID)
	unwanted := started.Conn != nil && (t.givenUp || s.closed)
	if unwanted {
		a = Answer{ID: o.ID, Done: true, Error: "nobody waits for it any more"}
	} else if started.Conn != nil {
		k := &kept{order: o.ID, replica: o.Replica, function: o.Spec.Function, epoch: o.Epoch, conn: started.Conn}
		k.timer = time.AfterFunc(s.cfg.Unclaimed, func() { s.expire(k) })
		s.kept[o.Replica] = k
	}
	s.answers.Add(o.ID, a)
	reply := t.reply
	s.answer(reply, a)
	s.mu.Unlock()
	if unwanted {
		_ = started.Conn.Close()
		s.end(o.Replica)
	}
	s.Changed()
}

// answer sends an answer to the process that has asked, if it listens.
func (s *Server) answer(reply string, a Answer) {
	if !strings.HasPrefix(reply, kindAnswer) {
		return
	}
	a.V, a.From = Version, s.cfg.Me
	_ = s.send(reply, a) // who waits for it asks again
}

// giveUp cancels an order that nobody waits for. If the order has started a replica that nobody has
// claimed, the replica is stopped.
func (s *Server) giveUp(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.running[id]
	switch {
	case t != nil:
		t.givenUp = true
		t.cancel(errors.New("nobody waits for it any more"))
		return
	case !s.answers.Contains(id): // it may still come
		s.answers.Add(id, Answer{ID: id, Done: true, Error: "the order was cancelled before it arrived"})
		return
	}
	for _, k := range s.kept {
		if k.order == id {
			s.dropKept(k)
			return
		}
	}
}

// expire stops a replica whose socket nobody has claimed in time.
func (s *Server) expire(k *kept) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.kept[k.replica] == k {
		s.cfg.Log.Warn("replica's socket was not claimed; the replica is stopped", "replica", k.replica, "waited", s.cfg.Unclaimed)
		s.dropKept(k)
	}
}

// dropKept stops a replica whose socket nobody has claimed. The caller holds s.mu.
func (s *Server) dropKept(k *kept) {
	k.timer.Stop()
	delete(s.kept, k.replica)
	_ = k.conn.Close()
	if !s.closed {
		s.work.Go(func() { s.end(k.replica) })
	}
}

// endTimeout bounds the end of a replica that nobody wants.
const endTimeout = 15 * time.Second

func (s *Server) end(replica string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.ctx), endTimeout)
	defer cancel()
	if _, err := s.cfg.Worker.Do(ctx, Order{V: Version, Kind: OrderStop, Replica: replica, Grace: time.Second}); err != nil {
		s.cfg.Log.Error("a replica that was not claimed may still run", "replica", replica, "error", err)
	}
	s.Changed()
}

// takeKept hands out a started replica's socket, once.
func (s *Server) takeKept(replica, order string) (*kept, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kept[replica]
	if k == nil || k.order != order {
		return nil, fmt.Errorf("no socket of replica %q waits for order %s: it was handed out, or its time is up", replica, order)
	}
	k.timer.Stop()
	delete(s.kept, replica)
	return k, nil
}
