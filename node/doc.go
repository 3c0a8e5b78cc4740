// Package node is the protocol between the process that steers a cluster and the KeysManagers of its nodes, each a daemon of
// its own: `stagecoach keysmanager`. docs/node-protocol.md describes it for other implementations.
//
// A [Server] is the daemon's side. It announces an [Inventory] every second and on change, and takes orders, each carried out
// once however often it comes, and answered by its progress and then a result. A [Directory] is the other side: it listens to
// announcements, has a [Client] for each node that it hears, and says who has come, who has fallen silent and what runs where.
//
// Inventories, orders, answers and events are JSON on a [Bus], which package queue has over NATS. Descriptors cannot travel
// there: a started replica's stage socket, and the lines that replicas print, go over the daemon's unix socket. So a node is on
// the machine of those who steer it.
package node
