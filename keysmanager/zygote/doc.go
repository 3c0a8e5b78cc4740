// Package zygote is a daemon's side of the protocol with a zygote: a process that has loaded
// parameters and forks replicas of itself. Package stage/zygote is the other side: it runs in the
// zygote, in C and Go, and knows nothing of daemons. Both speak wire.Order over one SOCK_SEQPACKET
// socket.
//
// A [Zygote] goes through these steps:
//
//   - Load starts the process and waits until it has loaded. Pack makes sealed memory that replicas
//     map, in place of a process. Adopt takes over a zygote that an earlier daemon has left to the
//     warden.
//   - Fork makes a child a replica. A child waits at its gate, a socket of its own, until a message
//     says which replica it is. EnsureSpare forks a child before an order needs it, and can park it
//     on a device.
//   - Kill or Stop ends the zygote. Leave leaves the zygote to the warden for the next daemon. Gone
//     is closed when the zygote was left, or has ended and the ends of all its children were
//     reported.
//
// A Zygote owns its descriptors: its control socket, the gates of its children, its sealed memory.
// No other code reads, writes or closes them.
package zygote
