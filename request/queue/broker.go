package queue

import "github.com/nats-io/nats.go"

// Broker is the NATS of a control plane: the embedded [Server], or a [Cluster] outside.
type Broker interface {
	// Connect opens a new connection. Components with much traffic should have their own.
	Connect(name string) (*nats.Conn, error)
	// Disk returns the storage of the streams.
	Disk() *Disk
	// URL returns the address for nodes; empty: nodes cannot connect.
	URL() string
	// Close ends the broker. Close its connections first.
	Close()
}
