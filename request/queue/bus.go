package queue

import (
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
)

// Bus carries tasks to the owners of functions and replies back, as core NATS messages.
type Bus struct{ nc *nats.Conn }

// NewBus returns a Bus over nc. The caller closes nc.
func NewBus(nc *nats.Conn) *Bus { return &Bus{nc: nc} }

// Submit sends an encoded task to the owner of function.
func (b *Bus) Submit(function string, msg []byte) error {
	if err := b.nc.Publish(taskSubject(function), msg); err != nil {
		return fmt.Errorf("submit %d bytes to %q: %w", len(msg), function, err)
	}
	return nil
}

// Tasks calls handler with each task for function, in order, until stop is called. The argument
// more is true if another call follows at once. When stop returns, no handler runs or will run.
func (b *Bus) Tasks(function string, handler func(msg []byte, more bool)) (stop func(), err error) {
	return b.subscribe(taskSubject(function), func(m *nats.Msg) {
		// Pending counts this message until it is handled. After an error, this message counts as
		// the last.
		waiting, _, err := m.Sub.Pending()
		handler(m.Data, err == nil && waiting > 1)
	})
}

// Inbox creates a unique subject and calls handler with each message sent there, in order.
func (b *Bus) Inbox(handler func(msg []byte)) (subject string, stop func(), err error) {
	subject = nats.NewInbox()
	stop, err = b.subscribe(subject, func(m *nats.Msg) { handler(m.Data) })
	return subject, stop, err
}

// Reply sends an encoded reply to an inbox.
func (b *Bus) Reply(to string, msg []byte) error {
	if err := b.nc.Publish(to, msg); err != nil {
		return fmt.Errorf("reply of %d bytes: %w", len(msg), err)
	}
	return nil
}

// Announce sends a message to all processes that [Bus.Hear] a name. It is not stored.
func (b *Bus) Announce(name string, msg []byte) error {
	if err := b.nc.Publish("all."+Token(name), msg); err != nil {
		return fmt.Errorf("announce %d bytes to %q: %w", len(msg), name, err)
	}
	return nil
}

// Hear calls handler with each message that is announced under a name, in order, until stop is
// called. When stop returns, no handler runs or will run.
func (b *Bus) Hear(name string, handler func(msg []byte)) (stop func(), err error) {
	return b.subscribe("all."+Token(name), func(m *nats.Msg) { handler(m.Data) })
}

func (b *Bus) subscribe(subject string, handler nats.MsgHandler) (stop func(), err error) {
	sub, done, err := b.open(subject, handler)
	if err != nil {
		return nil, err
	}
	return func() {
		_ = sub.Unsubscribe() // fails if it has ended already
		<-done
	}, nil
}

// drainMost bounds how long a subscription that ends takes the messages that are on their way.
const drainMost = 2 * time.Second

// drain ends a subscription that open has returned. Its handler gets the messages that are on their
// way, unless the connection is lost. When drain returns, the handler has ended.
func (b *Bus) drain(sub *nats.Subscription, done <-chan struct{}) {
	if b.nc.IsConnected() && sub.Drain() == nil {
		late := time.NewTimer(drainMost)
		defer late.Stop()
		select {
		case <-done:
			return
		case <-late.C:
		}
	}
	_ = sub.Unsubscribe() // fails if it has ended already
	<-done
}

// open subscribes. done is closed when the subscription and its handler have ended.
func (b *Bus) open(subject string, handler nats.MsgHandler) (sub *nats.Subscription, done chan struct{}, err error) {
	if sub, err = b.nc.Subscribe(subject, handler); err != nil {
		return nil, nil, fmt.Errorf("subscribe to %q: %w", subject, err)
	}
	done = make(chan struct{})
	sub.SetClosedHandler(func(string) { close(done) }) // called when the handler has ended
	if err = sub.SetPendingLimits(1<<20, pendingBytes); err == nil {
		err = b.nc.Flush() // now the server knows the subscription
	}
	if err != nil {
		_ = sub.Unsubscribe() // the connection may be gone
		return nil, nil, fmt.Errorf("subscribe to %q: %w", subject, err)
	}
	return sub, done, nil
}
