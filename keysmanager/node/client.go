package node

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/wire"
)

// Pauses before a [Client] repeats an order under the same id. The first pause is sendAgain. Each
// next pause is twice as long, up to mostAgain, because a daemon that is slow to answer has much to
// do. The pause does not grow if the order could not be sent.
const (
	sendAgain = 250 * time.Millisecond
	mostAgain = 4 * time.Second
)

// orderTimeout bounds orders of callers who have no deadline.
const orderTimeout = time.Minute

// Client gives orders to a node's daemon. A [Directory] makes it. Its methods are safe for
// concurrent use.
type Client struct {
	name  string
	bus   Bus
	codes Codes
	epoch epochFunc
	me    string // the kind of answers to us
	stop  func() // listening to them
	reach reach

	mu      sync.Mutex
	inv     Inventory
	link    Link                   // of the latest connection for lines; empty: there was none
	waiting map[string]chan Answer // by the order's id
}

// newClient listens for answers about a node.
func newClient(bus Bus, name string, codes Codes, epoch epochFunc, to reach) (*Client, error) {
	c := &Client{name: name, bus: bus, codes: codes, epoch: epoch, reach: to, me: kindAnswer + rand.Text(), waiting: map[string]chan Answer{}}
	var err error
	c.stop, err = bus.Listen(name, c.me, func(_, _ string, data []byte) { c.answered(data) })
	return c, err
}

// Name is the node's.
func (c *Client) Name() string { return c.name }

// Inventory is the node's latest announcement.
func (c *Client) Inventory() Inventory {
	c.mu.Lock()
	defer c.mu.Unlock()
	inv := c.inv
	inv.Link = c.link
	return inv
}

// Far reports whether the node is reached over the tunnel: it shares no files with this process.
func (c *Client) Far() bool { return !c.reach.near(c.Inventory()) }

// answered passes an answer to the call that waits for it.
func (c *Client) answered(data []byte) {
	a, err := DecodeAnswer(data)
	if err != nil {
		return // nobody's, or from someone whose announcements say that we do not understand him
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	select {
	case c.waiting[a.ID] <- a: // of nobody: a nil channel
	default: // who waits is slow; the last answer can be asked for again
	}
}

// Start starts a replica and claims its stage socket. If ctx ends first, the replica is stopped.
// Start fills in the order's id, addressee and time. progress may be nil.
func (c *Client) Start(ctx context.Context, o Order, progress func(Phase)) (Started, error) {
	o.Kind = OrderStart
	a, o, err := c.do(ctx, o, progress)
	if err != nil {
		return Started{}, err
	}
	conn, err := c.claim(ctx, o)
	if err != nil {
		c.cancel(o)
		return Started{}, &Error{c.name, fmt.Errorf("replica %q has started, but its socket was not handed over: %w", o.Replica, err)}
	}
	return Started{PID: a.PID, Path: a.Path, Phases: a.Phases, Conn: conn}, nil
}

// Adopt takes the stage socket of a replica that runs already, in place of the control plane that
// has it or had it. The order has the replica, its function's spec, its revision and its home; the
// node announces the latter two from now on.
func (c *Client) Adopt(ctx context.Context, o Order) (wire.Socket, error) {
	epoch, err := c.epoch.now()
	if err != nil {
		return nil, &Error{c.name, err}
	}
	o.Kind = OrderStart
	if err := c.prepare(ctx, &o); err != nil {
		return nil, err
	}
	conn, err := c.take(ctx, socketRequest{
		V: Version, Want: wantSocket, Replica: o.Replica, Epoch: epoch, Keep: c.reach.keep, Adopt: true, Gateway: o.Gateway, Revision: o.Revision, Home: o.Home,
	})
	if err != nil {
		return nil, &Error{c.name, fmt.Errorf("take over replica %q: %w", o.Replica, err)}
	}
	return conn, nil
}

// stopMargin is how long an order to stop may take beyond the replica's grace.
const stopMargin = 5 * time.Second

// Stop ends a replica's process: with SIGTERM, and with SIGKILL after grace. It is no error if the
// replica does not run.
func (c *Client) Stop(ctx context.Context, replica string, grace time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, grace+stopMargin)
	defer cancel()
	_, err := c.Do(ctx, Order{Kind: OrderStop, Replica: replica, Grace: grace})
	return err
}

// SetCPU sets a replica's CPU limit in thousandths of a core; 0: as its function says.
func (c *Client) SetCPU(ctx context.Context, replica string, milli int) error {
	_, err := c.Do(ctx, Order{Kind: OrderSetCPU, Replica: replica, CPUMilli: milli})
	return err
}

// Warm loads and evicts parameters. The argument wanted is the whole list of parameters to keep.
func (c *Client) Warm(ctx context.Context, wanted []Wanted) error {
	_, err := c.Do(ctx, Order{Kind: OrderWarm, Wanted: wanted})
	return err
}

// Do gives an order of any other kind to the daemon, and returns how many bytes of memory were
// loaded or evicted. If ctx ends first, the daemon is told to cancel the order.
func (c *Client) Do(ctx context.Context, o Order) (bytes int64, err error) {
	a, _, err := c.do(ctx, o, nil)
	return a.Bytes, err
}

// do sends an order repeatedly under one id, until it is answered or ctx ends.
func (c *Client) do(ctx context.Context, o Order, progress func(Phase)) (Answer, Order, error) {
	if _, bounded := ctx.Deadline(); !bounded {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, orderTimeout)
		defer cancel()
	}
	if err := c.prepare(ctx, &o); err != nil {
		return Answer{}, o, err
	}
	until, _ := ctx.Deadline()
	inv := c.Inventory()
	o = o.fit(inv.Knows)
	o.V, o.ID, o.To = Version, rand.Text(), inv.ID
	answers := make(chan Answer, 64)
	c.mu.Lock()
	c.waiting[o.ID] = answers
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		delete(c.waiting, o.ID)
		c.mu.Unlock()
	}()
	var sent error // why the latest attempt was not sent
	accepted := false
	var done []string // phases that have ended
	send := func() error {
		o.Within = min(max(time.Until(until), time.Millisecond), maxWithin)
		if o.Epoch, sent = c.epoch.now(); errors.Is(sent, ErrOldEpoch) {
			return sent
		} else if sent != nil {
			return nil // perhaps it may act again soon
		}
		b, err := json.Marshal(o)
		if err == nil {
			sent = c.bus.Send(c.name, kindOrder, c.me, b)
		}
		return err
	}
	pause := sendAgain
	again := time.NewTimer(pause)
	defer again.Stop()
	if err := send(); err != nil {
		return Answer{}, o, &Error{c.name, fmt.Errorf("order to %s: %w", o.Kind, err)}
	}
	for {
		select {
		case <-ctx.Done():
			c.cancel(o)
			return Answer{}, o, &Error{c.name, fmt.Errorf("order to %s: %s: %w", o.Kind, unanswered(accepted, done, sent), context.Cause(ctx))}
		case <-again.C:
			_ = send() // it could be encoded
			if sent == nil {
				pause = min(2*pause, mostAgain)
			}
			again.Reset(pause)
		case a := <-answers:
			switch {
			case a.Done && a.Error != "":
				return a, o, c.failure(a)
			case a.Done:
				return a, o, nil
			}
			accepted = true
			if a.Phase != nil {
				done = append(done, a.Phase.Name)
			}
			if a.Phase != nil && progress != nil {
				progress(*a.Phase)
			}
		}
	}
}

// failure returns the error in an answer.
func (c *Client) failure(a Answer) error {
	e := &answered{text: a.Error, kind: c.codes[a.Code], memory: a.Memory}
	if a.Code == CodeNoRoom && a.Bytes > 0 {
		e.room = &roomError{a.Bytes}
	}
	return &Error{c.name, e}
}

// unanswered describes the progress of an order without a final answer.
func unanswered(accepted bool, done []string, sent error) string {
	switch {
	case sent != nil:
		return "not sent: " + sent.Error()
	case len(done) > 0:
		return "not ended, after " + strings.Join(done, ", ")
	case accepted:
		return "the daemon has it and has not answered yet"
	}
	return "the daemon does not answer"
}

// cancel tells the daemon that nobody waits for an order any more. If the message is lost, the
// order ends at its own deadline.
func (c *Client) cancel(o Order) {
	epoch, err := c.epoch.now()
	if err != nil {
		return
	}
	b, err := json.Marshal(Order{V: Version, ID: rand.Text(), To: o.To, Epoch: epoch, Kind: OrderCancel, Within: time.Second, Target: o.ID})
	if err == nil {
		_ = c.bus.Send(c.name, kindOrder, "", b)
	}
}

// missed asks for events after a number.
func (c *Client) missed(ctx context.Context, since uint64) ([]Event, error) {
	a, _, err := c.do(ctx, Order{Kind: OrderEvents, Since: since}, nil)
	return a.Events, err
}

// refuse tells the daemon that its node is not used, and why. It sends nothing and returns false if
// this control plane may not act.
func refuse(cfg DirectoryConfig, to Identity, cause string) bool {
	epoch, err := epochFunc(cfg.Epoch).now()
	if err != nil {
		return false
	}
	b, err := json.Marshal(Order{V: Version, ID: rand.Text(), To: to.ID, Epoch: epoch, Kind: OrderRefuse, Within: time.Second, Cause: cause})
	return err == nil && cfg.Bus.Send(to.Name, kindOrder, "", b) == nil
}
