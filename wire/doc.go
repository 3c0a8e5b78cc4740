// Package wire is what goes over sockets and messages: the stage protocol between a dispatcher and a replica, the fork
// orders between a KeysManager and a zygote, and the encoding of tasks and replies over NATS.
//
// # Stage protocol
//
// One unix stream socket a replica. Both sides send frames; every integer is little-endian:
//
//	u32 length   of what follows the 16-byte header
//	u8  type     see FrameType
//	u8  flags    bit 0: the frame carries file descriptors (their number is u8 at offset 6)
//	u8  fds      how many file descriptors ride with the frame (SCM_RIGHTS)
//	u8  version  of the protocol, in every frame
//	u64 batch    which batch the frame is about; 0: none
//
//	replica                     dispatcher
//	   Hello  ───────────────────▶          version range, pid, function, slots, largest batch, load and place times
//	          ◀───────────────── Welcome    chosen version, credits for chunks
//	          ◀───────────────── Batch      calls: key, deadline, trace context, header, input
//	   Chunk  ───────────────────▶          a piece of call i's output, costs credit
//	          ◀───────────────── Credit     more chunk bytes may be sent
//	   Result ───────────────────▶          call i: output, service time
//	   Error  ───────────────────▶          call i: code, message
//	          ◀───────────────── Cancel     call i, or all of the batch
//	   Credit ───────────────────▶          the number of batches that may be in flight changed
//	          ◀───────────────── Threads    so many threads compute from now on, at the least; version 2
//	          ◀───────────────── Drain      finish, then close
//
// A batch is over when each of its calls has a Result or an Error. A canceled call still gets one, when its
// handler has ended. A dispatcher replaces a replica whose handler does not end. After a Drain, a replica
// still listens to Cancel and Credit until all is answered. One that is told to end by a signal says so with a Credit of 0, and
// answers what was on its way with an Error of code task.ReplicaLost.
// A call for which the replica's device has not the memory gets an Error of code task.OutOfMemory; the replica is drained then. One
// that cannot come up for that reason ends, and its last line on stderr has OutOfMemoryOn in it.
// A receiver refuses frames above MaxFrame bytes and unknown types of its own version; unknown types of a later version
// are skipped.
//
// # Fork orders
//
// One SOCK_SEQPACKET socket a zygote, one message an order; see [Order].
package wire
