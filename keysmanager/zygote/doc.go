// Package zygote is a daemon's side of the protocol with a zygote: a process that has loaded
// parameters and forks replicas of itself. Package stage/zygote is the other side: it runs in the
// zygote, in C and Go, and knows nothing of daemons. Both speak wire.Order over one SOCK_SEQPACKET
// socket.
//
// A [Zygote] goes through these steps:
//
//   - Load starts a zygote process and waits until it has loaded. Pack makes sealed memory, which
//     needs no process. Adopt takes over what an earlier daemon has left to the warden.
//   - Fork makes a child a replica. The child waits at its gate, a socket, until it is told which
//     replica it is. EnsureSpare forks a child ahead of need, and can park the child on a device.
//   - Kill or Stop ends the zygote. Leave leaves it to the warden, for the next daemon. Gone is
//     closed when the zygote has ended and the ends of all its children were reported.
//
// A Zygote owns its descriptors: its control socket, the gates of its children, its sealed memory.
// Nobody else reads, writes or closes them.
package zygote
