package node

// Bus carries messages about nodes by their kind; queue.Link implements it over NATS. Messages are
// not stored.
type Bus interface {
	// Send sends a message about a node. reply is the kind that answers to the message will have;
	// they are about the same node. If reply is empty, no answer is expected.
	Send(node, kind, reply string, data []byte) error
	// Listen calls f, in order, with each message of a kind about a node, or about any node if node is
	// empty. It does so until stop is called; after stop has returned, f does not run. f gets empty
	// data if nobody listened to a message that asked for replies of this kind.
	Listen(node, kind string, f func(node, reply string, data []byte)) (stop func(), err error)
}

// The kinds of messages. Answers have the kind kindAnswer plus the id of the asking process.
const (
	kindInventory = "inventory" // announcements
	kindOrder     = "order"
	kindEvent     = "event"
	kindAnswer    = "answer."
)
