package queue

import (
	"fmt"

	"github.com/nats-io/nats.go"
)

// Bus carries tasks to the owners of functions and replies back, as core NATS messages.
type Bus struct{ nc *nats.Conn }

// NewBus returns a Bus over nc, which stays the caller's to close.
func NewBus(nc *nats.Conn) *Bus { return &Bus{nc: nc} }

// Submit sends an encoded task to the owner of function.
func (b *Bus) Submit(function string, msg []byte) error {
	if err := b.nc.Publish(taskSubject(function), msg); err != nil {
		return fmt.Errorf("submit %d bytes to %q: %w", len(msg), function, err)
	}
	return nil
}

// Tasks calls handler with each task for function, in order, until stop is called; more says that another call follows at
// once. When stop returns, handler is not running and will not be called again.
func (b *Bus) Tasks(function string, handler func(msg []byte, more bool)) (stop func(), err error) {
	return b.subscribe(taskSubject(function), func(m *nats.Msg) {
		waiting, _, err := m.Sub.Pending() // this one counts until it is handled; an error: the last one
		handler(m.Data, err == nil && waiting > 1)
	})
}

// Inbox makes a subject that nobody else has and calls handler with each message sent there, in order.
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

func (b *Bus) subscribe(subject string, handler nats.MsgHandler) (func(), error) {
	sub, err := b.nc.Subscribe(subject, handler)
	if err != nil {
		return nil, fmt.Errorf("subscribe to %q: %w", subject, err)
	}
	done := make(chan struct{})
	sub.SetClosedHandler(func(string) { close(done) }) // when the handler is not running any more
	if err = sub.SetPendingLimits(1<<20, pendingBytes); err == nil {
		err = b.nc.Flush() // from here on the server knows the interest
	}
	if err != nil {
		_ = sub.Unsubscribe() // the connection may be gone
		return nil, fmt.Errorf("subscribe to %q: %w", subject, err)
	}
	return func() {
		_ = sub.Unsubscribe() // fails when it has ended already
		<-done
	}, nil
}
