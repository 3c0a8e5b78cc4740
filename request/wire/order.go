package wire

// OrderVersion is the version of the messages between a KeysManager and a zygote.
const OrderVersion = 3

// The environment of a zygote, or of a replica that is not a zygote's child. The KeysManager sets
// it.
const (
	// EnvZygoteFD makes a stage binary a zygote. It loads its model and then takes orders on this
	// descriptor.
	EnvZygoteFD = "STAGECOACH_ZYGOTE_FD"
	// EnvStageFD is the descriptor of a replica's stage socket.
	EnvStageFD = "STAGECOACH_STAGE_FD"
	// EnvWorker, set together with EnvZygoteFD, makes a Python stage binary a worker. A worker is a
	// process that creates the context of its device, and whose children are its own threads. All
	// comments about children below apply to these threads, with three differences:
	//   - The pid is the thread's id.
	//   - Descriptors and environment belong to the thread alone.
	//   - A thread ends with status 0, or 256 if its stage has failed.
	//
	// If a worker cannot end a thread after an OrderKill with SIGKILL, the worker ends.
	EnvWorker = "STAGECOACH_WORKER"
	// EnvStageRoot is the absolute path of the root of a stage's image. It is set in the OrderBegin
	// of a worker's thread.
	EnvStageRoot = "STAGECOACH_STAGE_ROOT"
	// EnvModel is the file or folder of the model, relative to the working directory; empty: no
	// model.
	EnvModel = "STAGECOACH_MODEL"
	// EnvRuntime is the runtime of the stage's processes: python; or onnx or empty, for ONNX
	// Runtime in a Go program.
	EnvRuntime = "STAGECOACH_RUNTIME"
	// EnvORT is the path of ONNX Runtime's shared library.
	EnvORT = "STAGECOACH_ORT_LIB"
	// EnvPoolThreads is the number of intra-op threads for a zygote's session. The zygote records
	// their starts, and a child starts as many of them as its order says.
	EnvPoolThreads = "STAGECOACH_POOL_THREADS"
	// EnvThreads is how many of these threads a replica starts that is not a zygote's child.
	EnvThreads = "STAGECOACH_THREADS"
	// EnvPrepacked is the folder where zygotes of an image store results for later zygotes: a
	// model's pre-packed form (package stage/zygote), or compiled code (torch.compile in Python
	// stages).
	EnvPrepacked = "STAGECOACH_PREPACKED"
	// EnvPack makes a stage binary write its model's pre-packed form to the descriptors 4 and 5,
	// and then end. EnvMapped means that a replica has that form on these descriptors.
	EnvPack   = "STAGECOACH_PACK"
	EnvMapped = "STAGECOACH_MAPPED"
	// EnvReplica is the name of a replica, and EnvFunction the key of its function.
	EnvReplica  = "STAGECOACH_REPLICA"
	EnvFunction = "STAGECOACH_FUNCTION"
	// EnvIdempotent is "false" if no call of the function may run twice.
	EnvIdempotent = "STAGECOACH_IDEMPOTENT"
	// EnvImage tells `stagecoach watchdog` the sandbox.Image whose program it runs, as JSON.
	EnvImage = "STAGECOACH_IMAGE"
	// EnvAccount tells `stagecoach watchdog` the sandbox.Account of the program, as JSON; empty:
	// the watchdog's own.
	EnvAccount = "STAGECOACH_ACCOUNT"
	// EnvNetwork tells `stagecoach watchdog` the [Network] of the replica, as JSON; empty: the
	// machine's network.
	EnvNetwork = "STAGECOACH_NETWORK"
	// EnvSecrets tells `stagecoach watchdog` the absolute path of the folder with the program's
	// secrets; empty: none.
	EnvSecrets = "STAGECOACH_SECRETS"
	// EnvRendezvous tells `stagecoach watchdog` the socket of its node's daemon, which passes
	// connections to gateways on other machines; empty: the gateway is on this machine.
	EnvRendezvous = "STAGECOACH_RENDEZVOUS"
	// EnvOutOfMemory tells `stagecoach watchdog` how to detect that a process was killed for its
	// memory. The value is an absolute path, a space, and a text. The file at the path counts the
	// killed processes of the watchdog's cgroup. The text is the error for such a process. The
	// value is empty if the file is unknown.
	EnvOutOfMemory = "STAGECOACH_OUT_OF_MEMORY"
	// EnvSpare tells `stagecoach watchdog` to wait until a replica needs it, and on which descriptor.
	// Its other variables are those of the replica, but for EnvReplica.
	EnvSpare = "STAGECOACH_SPARE"
	// EnvProgram is the prefix of the program's own variables for `stagecoach watchdog`. Without
	// it, a function's variable such as LD_PRELOAD would affect the watchdog, which may be root.
	EnvProgram = "STAGECOACH_ENV_"
	// EnvSealed makes a stage binary refuse inspection by other processes of its user.
	EnvSealed = "STAGECOACH_SEALED"
	// EnvReady tells `stagecoach watchdog` the HTTP path of the readiness probe; empty: see package
	// watchdog.
	EnvReady = "STAGECOACH_READY_PATH"
	// EnvHealth tells `stagecoach watchdog` how to probe the program's health: DELAY,PERIOD,PATH.
	// An empty path means no probe; empty times mean defaults.
	EnvHealth = "STAGECOACH_HEALTH"
)

// Network describes the network of a replica to its watchdog, which runs in that network. The zero
// value is the machine's network, which replicas share.
type Network struct {
	// Nobody else listens on the replica's loopback addresses.
	Own bool `json:"own"`
	// path of the program's /etc/hosts; empty: the machine's.
	Hosts string `json:"hosts,omitempty"`
	// path of the program's /etc/resolv.conf; empty: the machine's.
	Resolv string `json:"resolv,omitempty"`
}

// OrderKind is the kind of a message on a zygote's socket, and its first byte.
type OrderKind byte

// The messages on a zygote's SOCK_SEQPACKET socket and on a child's gate. All integers are
// little-endian. A text extends to the end of its message. stage/zygote/zygote.c has the same
// layouts in C.
//
// A worker (EnvWorker) answers like a zygote, with these differences:
//
//   - It loads no stage before it is ready. It only initializes its device, if its own
//     CUDA_VISIBLE_DEVICES names one.
//   - A thread that gets its OrderBegin imports, loads and places the stage of EnvStageRoot, which
//     becomes its working directory. Then it serves its stage socket. CUDA_VISIBLE_DEVICES in the
//     order has no effect.
//   - A ChildExited has the status that the stage would have had as a process. 0 means that the
//     stage drained, or that its stage socket was closed. 1<<8 means that it could not load or
//     place, or that its dispatcher broke the protocol; the last line on its stderr says why.
//     SIGKILL means that it was killed.
//   - OrderKill with SIGTERM or SIGINT drains a stage. Any other signal ends the stage. If the
//     stage has not ended two seconds later, the worker ends too, with status 1.
//   - There is no OrderPark at a worker's gates.
const (
	// OrderFork, manager to zygote: u8 kind, u8 version, u16 0, u32 id. One descriptor comes with
	// it: the child's end of its gate, a SOCK_SEQPACKET socket. The child has no other descriptors
	// than the gate and the zygote's stdin, stdout and stderr. Its name in ps is spare. The child
	// waits at its gate for an OrderBegin, and ends with status 0 if the gate is closed. The
	// manager moves the child to its cgroups before the OrderBegin.
	OrderFork OrderKind = 'F'
	// OrderBegin, manager to child, on its gate: u8 kind, u8 version, u16 threads, u32 0, then
	// KEY=VALUE strings, each ended by a NUL, for its environment. Descriptors come with it: stage
	// socket, stdout, stderr. The order makes the child a replica, which then closes the gate.
	OrderBegin OrderKind = 'B'
	// OrderPark, manager to child, on its gate before OrderBegin: u8 kind, u8 version, u16 0, u32
	// 0, then KEY=VALUE strings as in OrderBegin. CUDA_VISIBLE_DEVICES names its device by UUID.
	// The child initializes that device as far as possible without parameters. It answers with a
	// ChildParked, or sends a ZygoteError and ends. Zygotes without devices do not know this order.
	OrderPark OrderKind = 'P'
	// ChildParked, child to manager, on its gate: u8 kind, u8 version, u16 0, u32 0, u64 duration
	// of the parking in ns.
	ChildParked OrderKind = 'D'
	// OrderKill, manager to zygote: u8 kind, u8 version, u16 signal, u32 pid. The zygote signals
	// only children that it has not reaped.
	OrderKill OrderKind = 'K'
	// OrderList, manager to zygote: u8 kind, u8 version, u16 0, u32 id. It asks for the living
	// children. The zygote answers with one ChildLives per child, then the same OrderList.
	OrderList OrderKind = 'L'
	// ZygoteReady, zygote to manager: u8 kind, u8 version, u16 recorded pool threads, u32 pid, u64
	// load time in ns, u32 flags (1: the weights are mapped from their pre-packed form), u32 0.
	ZygoteReady OrderKind = 'R'
	// ChildForked, zygote to manager: u8 kind, u8 version, u16 0, u32 id, u32 pid, u32 0, u64 fork
	// time in ns.
	ChildForked OrderKind = 'C'
	// ChildExited, zygote to manager: u8 kind, u8 version, u16 0, u32 pid, u32 status as from
	// wait(2).
	ChildExited OrderKind = 'X'
	// ChildLives, zygote to manager: u8 kind, u8 version, u16 0, u32 id of its fork order, u32 pid.
	ChildLives OrderKind = 'A'
	// ZygoteError, zygote to manager: u8 kind, u8 version, u16 reason (1: the model loads, but a
	// process that has loaded it cannot be forked), u32 id (0: loading failed and the zygote ends),
	// text.
	ZygoteError OrderKind = 'E'
)

// Order is a decoded message from a zygote's socket or a gate. Fields that its kind does not have
// are zero.
type Order struct {
	Kind    OrderKind
	Version byte
	ID      uint32
	PID     uint32
	Status  uint32   // ChildExited
	Signal  uint16   // OrderKill
	Threads uint16   // OrderBegin, ZygoteReady
	Nanos   uint64   // ZygoteReady, ChildForked
	Env     []string // OrderBegin, OrderPark
	// Prepacked, in ZygoteReady, means that the weights are mapped and not in the zygote's heap.
	// Unforkable, in ZygoteError, means that another start path works.
	Prepacked, Unforkable bool
	Text                  string // ZygoteError
}
