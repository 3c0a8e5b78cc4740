// Package node is the protocol between the control process and the KeysManagers of its nodes. Each
// KeysManager is a daemon: `stagecoach keysmanager`. docs/node-protocol.md describes the protocol
// for other implementations.
//
// A [Server] is the daemon's side. It announces an [Inventory] every second and on change. It
// carries out each order once, even if the order arrives several times. Its answers to an order are
// reports of progress, and then a result.
//
// A [Directory] is the control process's side. It listens to announcements and has a [Client] for
// each node. It reports which nodes have come or fallen silent, and what runs on them.
//
// A KeysManager inside the control process takes the same [Order] directly and answers with the
// same [Started]. Other packages use the types of an order, its [Spec] and a [Phase] from here.
//
// Inventories, orders, answers and events are JSON on a [Bus], which package queue implements over
// NATS. File descriptors cannot travel over NATS. So the daemon has a unix socket. Over it go the
// stage sockets of started replicas, and the lines that replicas print. Therefore a node must be on
// the same machine as the control process.
package node
