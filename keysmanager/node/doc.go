// Package node is the protocol between the control plane and the daemons of its nodes
// (`stagecoach keysmanager`). docs/node-protocol.md describes it for other implementations.
//
// A [Server] is the daemon's side. It announces an [Inventory] every second and on change. It
// carries out each order once, even if the order arrives several times. It answers an order with
// its progress and then a result.
//
// A [Directory] is the control plane's side. It listens to announcements and has a [Client] for
// each node. It reports which nodes have come or fallen silent, and what runs on them.
//
// A KeysManager inside the control plane takes the same [Order] directly and answers with the
// same [Started]. Other packages use the types of an order, its [Spec] and a [Phase] from here.
//
// Inventories, orders, answers and events are JSON on a [Bus], which package queue implements over
// NATS. Descriptors cannot go over NATS, so the stage sockets of replicas go over the daemon's unix
// socket, and so do the lines that replicas print. If the node is on another machine, both are
// streams of package tunnel.
package node
