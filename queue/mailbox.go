package queue

import (
	"fmt"
	"sync"
)

// Neighbours are the parts of one process that send each other messages: what one of them listens to, another reaches
// without the broker. A subject has at most one listener in a cluster (the owner of a function, the maker of an inbox), so
// that one who listens here is the one who is meant.
//
// The zero value is ready. It is safe for concurrent use.
type Neighbours struct {
	mu    sync.RWMutex
	boxes map[string]*mailbox // by subject
}

// send hands a copy of msg to the listener of subject in this process; false: there is none.
func (n *Neighbours) send(subject string, msg []byte) (bool, error) {
	if n == nil {
		return false, nil
	}
	n.mu.RLock()
	box := n.boxes[subject]
	n.mu.RUnlock()
	if box == nil {
		return false, nil
	}
	return box.put(msg)
}

// listen calls handler with each message sent to subject from this process, in order, until stop is called.
func (n *Neighbours) listen(subject string, handler func(msg []byte, more bool)) (stop func()) {
	if n == nil {
		return func() {}
	}
	box := &mailbox{handler: handler, wake: make(chan struct{}, 1), done: make(chan struct{})}
	n.mu.Lock()
	if n.boxes == nil {
		n.boxes = map[string]*mailbox{}
	}
	n.boxes[subject] = box
	n.mu.Unlock()
	go box.run()
	return func() {
		n.mu.Lock()
		delete(n.boxes, subject)
		n.mu.Unlock()
		box.close()
	}
}

// mailbox is a queue of messages with one listener.
type mailbox struct {
	handler func(msg []byte, more bool)
	wake    chan struct{} // there is something in the queue, or it was closed
	done    chan struct{} // closed when the handler is not running and will not be called again

	mu     sync.Mutex
	queue  [][]byte
	bytes  int // in the queue
	closed bool
}

// put queues a copy of msg; false: the mailbox is closed.
func (b *mailbox) put(msg []byte) (bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		return false, nil
	}
	if b.bytes+len(msg) > pendingBytes {
		return true, fmt.Errorf("%d bytes wait already, want at most %d", b.bytes, pendingBytes)
	}
	b.bytes += len(msg)
	if b.queue = append(b.queue, append([]byte(nil), msg...)); len(b.queue) == 1 {
		b.ring()
	}
	return true, nil
}

func (b *mailbox) ring() {
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

func (b *mailbox) close() {
	b.mu.Lock()
	b.closed = true
	b.queue = nil
	b.ring()
	b.mu.Unlock()
	<-b.done
}

func (b *mailbox) run() {
	defer close(b.done)
	var taken [][]byte
	for range b.wake {
		for {
			clear(taken)
			b.mu.Lock()
			if b.closed {
				b.mu.Unlock()
				return
			}
			taken, b.queue, b.bytes = b.queue, taken[:0], 0
			b.mu.Unlock()
			if len(taken) == 0 {
				break
			}
			for i, msg := range taken {
				b.handler(msg, i < len(taken)-1)
			}
		}
	}
}
