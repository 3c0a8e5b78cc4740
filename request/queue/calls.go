package queue

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
)

// ErrNobody means that no process serves a call.
var ErrNobody = errors.New("queue: no process serves this call")

// Times of calls between processes.
const (
	callAlive   = 2 * time.Second  // between two signs of life of a call's server
	callSilence = 10 * time.Second // after which a call's server counts as gone
)

// Header fields of a call's messages.
const (
	headPart = "Part" // number of a part, from 1; absent: a sign of life
	headEnd  = "End"  // of the last message: the number of parts
	headFail = "Fail" // of the last message: why the answer is not complete
)

// Serve answers the calls of other processes to a name until stop is called. f runs in a goroutine
// per call; its context ends when the caller has gone. It sends the answer in parts, each of which
// fits into a message. If f returns an error, the caller gets an error with its text. stop also
// lets f answer the calls that are on their way. When stop returns, no f runs.
func (b *Bus) Serve(name string, f func(ctx context.Context, msg []byte, send func(part []byte) error) error) (stop func(), err error) {
	ctx, cancel := context.WithCancel(context.Background())
	var calls sync.WaitGroup
	sub, done, err := b.open(callSubject(name), func(m *nats.Msg) {
		calls.Go(func() { b.serve(ctx, m, f) })
	})
	if err != nil {
		cancel()
		return nil, err
	}
	return func() { b.drain(sub, done); cancel(); calls.Wait() }, nil
}

func callSubject(name string) string { return "call." + Token(name) }

// serve answers one call.
func (b *Bus) serve(ctx context.Context, m *nats.Msg, f func(context.Context, []byte, func([]byte) error) error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	gone, err := b.nc.Subscribe(m.Reply+".gone", func(*nats.Msg) { cancel() })
	if err != nil {
		return // the caller notices the silence
	}
	defer func() { _ = gone.Unsubscribe() }()
	var beats sync.WaitGroup
	beats.Go(func() {
		tick := time.NewTicker(callAlive)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_ = b.nc.Publish(m.Reply, nil)
			case <-ctx.Done():
				return
			}
		}
	})
	n := 0
	err = f(ctx, m.Data, func(part []byte) error {
		n++
		return b.nc.PublishMsg(&nats.Msg{Subject: m.Reply, Header: nats.Header{headPart: {strconv.Itoa(n)}}, Data: part})
	})
	end := nats.Header{headEnd: {strconv.Itoa(n)}}
	if err != nil {
		end[headFail] = []string{strings.Join(strings.Fields(err.Error()), " ")} // one line
	}
	_ = b.nc.PublishMsg(&nats.Msg{Subject: m.Reply, Header: end})
	cancel()
	beats.Wait()
}

// Call calls the process that serves a name, and passes the parts of its answer to part, in order.
// It returns [ErrNobody] if no process serves the name. After any other error, the call may have
// been carried out.
func (b *Bus) Call(ctx context.Context, name string, msg []byte, part func([]byte) error) error {
	inbox := nats.NewInbox()
	sub, err := b.nc.SubscribeSync(inbox)
	if err != nil {
		return fmt.Errorf("call of %q: %w", name, err)
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := sub.SetPendingLimits(1<<16, 64<<20); err != nil {
		return fmt.Errorf("call of %q: %w", name, err)
	}
	if err := b.nc.PublishRequest(callSubject(name), inbox, msg); err != nil {
		return fmt.Errorf("call of %q: %w: %w", name, ErrNobody, err)
	}
	for n := 0; ; {
		m, err := nextPart(ctx, sub)
		if err == nil && m.Header.Get(headPart) != "" {
			if n++; m.Header.Get(headPart) != strconv.Itoa(n) {
				err = fmt.Errorf("part %s comes after part %d", m.Header.Get(headPart), n-1)
			} else {
				err = part(m.Data)
			}
		}
		switch {
		case errors.Is(err, nats.ErrNoResponders):
			return fmt.Errorf("call of %q: %w", name, ErrNobody)
		case err != nil:
			_ = b.nc.Publish(inbox+".gone", nil)
			return fmt.Errorf("call of %q: %w", name, err)
		case m.Header.Get(headEnd) != "":
			if m.Header.Get(headEnd) != strconv.Itoa(n) {
				return fmt.Errorf("call of %q: %d parts of %s came", name, n, m.Header.Get(headEnd))
			}
			if why := m.Header.Get(headFail); why != "" {
				return fmt.Errorf("call of %q: %s", name, why)
			}
			return nil
		}
	}
}

// nextPart returns the next message of a call's server.
func nextPart(ctx context.Context, sub *nats.Subscription) (*nats.Msg, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, callSilence, fmt.Errorf("silent for %v", callSilence))
	defer cancel()
	m, err := sub.NextMsgWithContext(ctx)
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	return m, err
}
