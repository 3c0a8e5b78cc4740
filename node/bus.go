package node

// Bus carries messages about nodes by their kind; queue.Link does, over NATS. Nobody keeps them.
type Bus interface {
	// Send sends a message about a node. Answers go to the node's messages of the kind reply; empty: there are none.
	Send(node, kind, reply string, data []byte) error
	// Listen calls f with each message of a kind about a node, in order, until stop is called, after which f is not running;
	// an empty node is any. An empty data says that nobody had listened to what was sent with this kind as its reply.
	Listen(node, kind string, f func(node, reply string, data []byte)) (stop func(), err error)
}

// The kinds of messages. Answers go to kindAnswer and the id of who asks.
const (
	kindInventory = "inventory" // announcements
	kindOrder     = "order"
	kindEvent     = "event"
	kindAnswer    = "answer."
)
