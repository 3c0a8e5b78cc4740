package queue

import (
	"fmt"

	"github.com/nats-io/nats.go"
)

// Owners carries tasks between processes that each have an id: to the process that owns a function.
type Owners struct {
	*Bus
	me     string
	prefix string // of the subjects that hear of messages without a receiver
	stop   func()
}

// OpenOwners returns Owners of the process me. nobody is called with the tag of each message that
// [Owners.Send] has sent to a process that does not listen.
func OpenOwners(nc *nats.Conn, me string, nobody func(tag string)) (*Owners, error) {
	o := &Owners{Bus: NewBus(nc), me: me, prefix: nats.NewInbox() + "."}
	var err error
	o.stop, err = o.subscribe(o.prefix+"*", func(m *nats.Msg) {
		if len(m.Data) == 0 && m.Header.Get("Status") == "503" {
			nobody(m.Subject[len(o.prefix):])
		}
	})
	return o, err
}

// Close stops calls of nobody.
func (o *Owners) Close() { o.stop() }

func ownedSubject(owner, function string) string {
	b := append(appendToken(append(make([]byte, 0, 96), "task."...), owner), '.')
	return string(appendToken(b, function))
}

// Send sends an encoded task to the process that owns a function. tag is a word of letters and
// digits.
func (o *Owners) Send(owner, function, tag string, msg []byte) error {
	if err := o.nc.PublishRequest(ownedSubject(owner, function), o.prefix+tag, msg); err != nil {
		return fmt.Errorf("submit %d bytes to %q: %w", len(msg), function, err)
	}
	return nil
}

// Most returns the largest message in bytes.
func (o *Owners) Most() int { return int(o.nc.MaxPayload()) }

// Tasks is [Bus.Tasks] for tasks that were sent to this process. stop also lets handler take the
// tasks that are on their way, because their senders wait for an answer.
func (o *Owners) Tasks(function string, handler func(msg []byte, more bool)) (stop func(), err error) {
	sub, done, err := o.open(ownedSubject(o.me, function), func(m *nats.Msg) {
		waiting, _, err := m.Sub.Pending()
		handler(m.Data, err == nil && waiting > 1)
	})
	if err != nil {
		return nil, err
	}
	return func() { o.drain(sub, done) }, nil
}
