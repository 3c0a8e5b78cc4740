package wire

// OrderVersion is the version of the messages between a KeysManager and a zygote.
const OrderVersion = 3

// The environment that a KeysManager gives a zygote or a replica that it starts as an ordinary process.
const (
	// EnvZygoteFD, when set, makes a stage binary a zygote: it loads its model, then serves orders on this descriptor.
	EnvZygoteFD = "STAGECOACH_ZYGOTE_FD"
	// EnvStageFD is the descriptor of a replica's stage socket.
	EnvStageFD = "STAGECOACH_STAGE_FD"
	// EnvWorker, when set beside EnvZygoteFD, makes a Python stage binary a worker: a process that its device's context is made in, and
	// whose children are threads of its own. To it each word on children below is one of a thread, whose pid is the thread's id; the
	// thread takes descriptors and environment for itself alone, and ends with status 0, or 256 when its stage has failed. A worker
	// that cannot end a thread after an OrderKill with SIGKILL ends itself.
	EnvWorker = "STAGECOACH_WORKER"
	// EnvStageRoot is, in the OrderBegin of a worker's thread, the absolute path of the root of its stage's image.
	EnvStageRoot = "STAGECOACH_STAGE_ROOT"
	// EnvModel is the file or folder of the model, relative to the working directory; empty: the stage has no model.
	EnvModel = "STAGECOACH_MODEL"
	// EnvRuntime is what the stage's processes compute with: onnx, or empty, for ONNX Runtime in a Go program; python.
	EnvRuntime = "STAGECOACH_RUNTIME"
	// EnvORT is the path of ONNX Runtime's shared library.
	EnvORT = "STAGECOACH_ORT_LIB"
	// EnvPoolThreads is the number of intra-op threads that a zygote's session is made for; their starts are recorded,
	// and a child starts as many as its order says.
	EnvPoolThreads = "STAGECOACH_POOL_THREADS"
	// EnvThreads is how many of these a replica that is no zygote's child starts with.
	EnvThreads = "STAGECOACH_THREADS"
	// EnvPrepacked is the folder for what zygotes of an image make for later ones: a model's pre-packed form (package
	// stage/zygote), or what torch.compile has made (stages in Python).
	EnvPrepacked = "STAGECOACH_PREPACKED"
	// EnvPack, when set, makes a stage binary write its model's pre-packed form to descriptors 4 and 5 and end. EnvMapped, when
	// set, says that a replica has that form there.
	EnvPack   = "STAGECOACH_PACK"
	EnvMapped = "STAGECOACH_MAPPED"
	// EnvReplica is the name of a replica, EnvFunction its function's key.
	EnvReplica  = "STAGECOACH_REPLICA"
	EnvFunction = "STAGECOACH_FUNCTION"
	// EnvImage is, for `stagecoach watchdog`, the sandbox.Image whose program it runs, as JSON.
	EnvImage = "STAGECOACH_IMAGE"
	// EnvAccount is, for `stagecoach watchdog`, the sandbox.Account that the program runs as, as JSON; empty: as the watchdog.
	EnvAccount = "STAGECOACH_ACCOUNT"
	// EnvNetwork is, for `stagecoach watchdog`, the [Network] of the replica, as JSON. Empty means the machine's network.
	EnvNetwork = "STAGECOACH_NETWORK"
	// EnvSecrets is, for `stagecoach watchdog`, the absolute path of the folder with its program's
	// secrets; empty: it has none.
	EnvSecrets = "STAGECOACH_SECRETS"
	// EnvOutOfMemory is for `stagecoach watchdog`. It has the absolute path of the file of its
	// cgroup that counts processes killed for their memory, a space, and the error text for such a
	// process. It is empty if the file is not known.
	EnvOutOfMemory = "STAGECOACH_OUT_OF_MEMORY"
	// EnvProgram begins the names of its program's environment: a watchdog may be root, and what the function's says is not
	// for a process that is (LD_PRELOAD).
	EnvProgram = "STAGECOACH_ENV_"
	// EnvSealed, when set, has a stage binary let no other process of its user look into it.
	EnvSealed = "STAGECOACH_SEALED"
	// EnvReady is, for `stagecoach watchdog`, the HTTP path that says whether the program is ready; empty: see its package.
	EnvReady = "STAGECOACH_READY_PATH"
	// EnvHealth is, for `stagecoach watchdog`, how its program is asked whether it is still well: DELAY,PERIOD,PATH. An empty
	// path: not at all; empty times: defaults.
	EnvHealth = "STAGECOACH_HEALTH"
)

// Network describes the network of a replica to its watchdog, which runs in that network itself. The zero value is the machine's
// network, which all replicas share.
type Network struct {
	Own    bool   `json:"own"`              // nobody else listens on the replica's loopback addresses
	Hosts  string `json:"hosts,omitempty"`  // path of the program's /etc/hosts; empty: the machine's
	Resolv string `json:"resolv,omitempty"` // path of the program's /etc/resolv.conf; empty: the machine's
}

// OrderKind tells the messages on a zygote's socket apart. Each is the first byte of its message.
type OrderKind byte

// The messages on a zygote's SOCK_SEQPACKET socket, and on a child's gate. All integers are little-endian; text runs to the message's end.
// stage/zygote/zygote.c holds the same layouts in C.
//
// A worker (EnvWorker) answers as a zygote does, with these differences. It loads no stage before it is ready, but its device is: the
// one that its own CUDA_VISIBLE_DEVICES names, if any. A thread that is begun imports, loads and places the stage of EnvStageRoot, which
// becomes its working directory, and then serves its stage socket; CUDA_VISIBLE_DEVICES in its order means nothing. A ChildExited has the
// status that the stage would have ended with as a process: 0, drained or its stage socket closed; 1<<8, not loaded or not placed,
// or its dispatcher broke the protocol, and the last line on its stderr says why; SIGKILL, killed. OrderKill with SIGTERM or SIGINT drains a
// stage, with any other signal it ends the stage: one that has not let go two seconds later takes the worker with it, which ends with status 1.
// At a worker's gates there is no OrderPark.
const (
	// OrderFork, manager to zygote: u8 kind, u8 version, u16 0, u32 id. One descriptor rides along: the child's end of its gate, a
	// SOCK_SEQPACKET socket. The child has no other descriptors than that and the zygote's stdin, stdout and stderr, is named
	// spare, as ps shows, and waits at its gate for an OrderBegin; at the gate's end of file it ends with status 0. By then the manager has moved it to its cgroups.
	OrderFork OrderKind = 'F'
	// OrderBegin, manager to child, on its gate: u8 kind, u8 version, u16 threads, u32 0, then KEY=VALUE strings, each ended by a NUL,
	// for its environment. Descriptors ride along: stage socket, stdout, stderr. It says who the child is; the gate is closed.
	OrderBegin OrderKind = 'B'
	// OrderPark, manager to child, on its gate before OrderBegin: u8 kind, u8 version, u16 0, u32 0, then KEY=VALUE strings as OrderBegin
	// has them, of which CUDA_VISIBLE_DEVICES names its device by UUID. The child makes itself ready on that device, as far as it can without
	// parameters, and answers with a ChildParked, or with a ZygoteError and its end. Zygotes without devices do not know it.
	OrderPark OrderKind = 'P'
	// ChildParked, child to manager, on its gate: u8 kind, u8 version, u16 0, u32 0, u64 time in ns that it took.
	ChildParked OrderKind = 'D'
	// OrderKill, manager to zygote: u8 kind, u8 version, u16 signal, u32 pid. Only a child not yet reaped is signalled.
	OrderKill OrderKind = 'K'
	// OrderList, manager to zygote: u8 kind, u8 version, u16 0, u32 id. Which children live? They are told by a ChildLives each;
	// the same message, back, ends the list.
	OrderList OrderKind = 'L'
	// ZygoteReady, zygote to manager: u8 kind, u8 version, u16 recorded pool threads, u32 pid, u64 load time in ns, u32 flags (1: the
	// weights are mapped from their pre-packed form), u32 0.
	ZygoteReady OrderKind = 'R'
	// ChildForked, zygote to manager: u8 kind, u8 version, u16 0, u32 id, u32 pid, u32 0, u64 fork time in ns.
	ChildForked OrderKind = 'C'
	// ChildExited, zygote to manager: u8 kind, u8 version, u16 0, u32 pid, u32 status as from wait(2).
	ChildExited OrderKind = 'X'
	// ChildLives, zygote to manager: u8 kind, u8 version, u16 0, u32 id of its fork order, u32 pid.
	ChildLives OrderKind = 'A'
	// ZygoteError, zygote to manager: u8 kind, u8 version, u16 reason (1: the model loads, but a process that has loaded it
	// cannot be forked), u32 id (0: loading failed and the zygote ends), text.
	ZygoteError OrderKind = 'E'
)

// Order is any message on a zygote's socket, decoded. Fields that a kind does not have are zero.
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
	// Prepacked, of ZygoteReady: its weights are mapped, not in its heap. Unforkable, of ZygoteError: another start path works.
	Prepacked, Unforkable bool
	Text                  string // ZygoteError
}
