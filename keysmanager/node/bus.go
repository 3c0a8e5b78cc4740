package node

// Bus carries messages about nodes by their kind; queue.Link implements it over NATS. Messages are
// not stored.
type Bus interface {
	// Send sends a message about a node. Answers to it are messages of the kind reply about this
	// node. Empty: no answer is expected.
	Send(node, kind, reply string, data []byte) error
	// Listen calls f with each message of a kind about a node, in order, until stop is called.
	// After stop returns, f does not run. An empty node means all nodes. If a message that was sent
	// with this kind as its reply had no listener, f gets empty data.
	Listen(node, kind string, f func(node, reply string, data []byte)) (stop func(), err error)
}

// The kinds of messages. Answers have the kind kindAnswer plus the id of the asking process.
const (
	kindInventory = "inventory" // announcements
	kindOrder     = "order"
	kindEvent     = "event"
	kindAnswer    = "answer."
)
