// Package wire defines what goes over sockets and messages: the stage protocol between a dispatcher
// and a replica, the fork orders between a KeysManager and a zygote, and the encoding of tasks and
// replies over NATS.
//
// # Stage protocol
//
// Each replica has one unix stream socket. Both sides send frames. All integers are little-endian:
//
//	u32 length   of the payload after the 16-byte header
//	u8  type     see FrameType
//	u8  flags    bit 0: the frame carries file descriptors (their number is u8 at offset 6);
//	             bits 1 and 2: see [Frame]; 0 to and from replicas
//	u8  fds      number of file descriptors with the frame (SCM_RIGHTS)
//	u8  version  of the protocol, in every frame
//	u64 batch    number of the frame's batch; 0: none
//
//	replica                     dispatcher
//	   Hello  ───────────────────▶          versions, pid, function, slots, largest batch, times
//	          ◀───────────────── Welcome    chosen version, credits for chunks
//	          ◀───────────────── Batch      calls: key, deadline, trace context, header, input
//	   Chunk  ───────────────────▶          a piece of call i's output, costs credit
//	          ◀───────────────── Credit     more chunk bytes may be sent
//	   Result ───────────────────▶          call i: output, service time
//	   Error  ───────────────────▶          call i: code, message
//	          ◀───────────────── Cancel     call i, or all of the batch
//	   Credit ───────────────────▶          new number of batches that may be in flight
//	          ◀───────────────── Threads    compute with at least this many threads; version 2
//	          ◀───────────────── Drain      finish, then close
//
// A batch is over when each of its calls has a Result or an Error. After a Cancel, a call still
// gets its Result or Error once its handler has ended. If the handler does not end, the dispatcher
// replaces the replica. After a Drain, a replica still obeys Cancel and Credit until it has
// answered all calls.
//
// A replica that gets a signal to end sends a Credit of 0. It answers batches that were on their
// way with an Error of code task.ReplicaLost. If the device has too little memory for a call, the
// call gets an Error of code task.OutOfMemory, and the dispatcher drains the replica. If the device
// has too little memory for the replica to start, the replica ends, and its last line on stderr
// contains OutOfMemoryOn.
//
// A receiver refuses frames above MaxFrame bytes, and frames of its own version with an unknown
// type. It skips frames of a later version with an unknown type.
//
// # Fork orders
//
// Each zygote has one SOCK_SEQPACKET socket, with one message per order; see [Order].
package wire
