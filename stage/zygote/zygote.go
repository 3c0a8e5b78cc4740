// Package zygote lets a stage binary load its model once and fork replicas of itself. Each replica
// is a normal Go process that already has the session.
//
// Forking a running Go program is unsafe, but forking before the Go runtime starts is safe. A
// program that imports this package has a C constructor. If the environment names a control socket
// (wire.EnvZygoteFD), the constructor loads ONNX Runtime and the model while the process has one
// thread. The process is then a zygote: it reports that it is ready, and serves fork orders
// (package wire, order.go) until the socket closes. Its Go main never runs. A forked child returns
// from the constructor into main:
//
//	if fd, env, ok := zygote.Child(); ok {
//		session := zygote.Inherited() // nil if the zygote has no model
//		… serve requests on the stage socket fd
//	}
//	session, err := zygote.Open(zygote.Options{…}) // an ordinary process
//
// # Environment of a zygote
//
//	STAGECOACH_ZYGOTE_FD     the control socket, SOCK_SEQPACKET; removed from the environment
//	STAGECOACH_MODEL         the ONNX file; empty: the zygote has no session, and forks nevertheless
//	STAGECOACH_ORT_LIB       ONNX Runtime's shared library, 1.24
//	STAGECOACH_POOL_THREADS  N, the maximum number of threads with which a replica can compute;
//	                         default: the CPUs that it may use
//	STAGECOACH_PREPACKED     a folder for the model's pre-packed form, see below; empty: the model
//	                         itself is loaded
//	STAGECOACH_SEALED        if set, processes of the same user cannot look into the zygote and its
//	                         children, nor into any other process of such a program
//
// # A child
//
// Before anything else, a child enters the cgroups whose descriptors came with its order. It has
// stdin, stdout, stderr and its stage socket, and no other open descriptor. It has the zygote's
// environment, arguments and folder. It ends with the zygote (SIGKILL). It has its own random
// seeds. All children have the same address layout, so one zygote never serves two tenants.
//
// # Threads
//
// Threads do not survive a fork. A session is made for N threads, including the calling thread, but
// the zygote only records the starts of the other N−1 threads. With an order for k threads, a child
// starts min(k, N)−1 of them, so that k threads compute; k = 0 and k = 1 start none. The calling
// thread does the work of threads that have not started. [Session.AddThreads] starts more of them
// later. No thread is ever stopped: a cgroup's quota limits them instead.
//
// # Pre-packed models
//
// The pre-packed form of a model is the model as ONNX Runtime has optimised it for this processor,
// with the weights in the layout of the kernels. Its weights are mapped and not copied to the heap.
// The zygote loads this form from the file NAME.ort-VERSION.prepacked in the folder
// STAGECOACH_PREPACKED. If the file is missing, the zygote writes it first. The caller makes sure
// that the folder is used for one model content on one kind of machine. If the file cannot be
// written or read, a line on stderr says why, and the model itself is loaded. ZygoteReady reports
// which form was loaded.
//
// Ordinary processes can share a pre-packed model, too. This is for programs that cannot be forked,
// because their libraries start threads of their own:
//
//   - A process with STAGECOACH_PACK in its environment writes the model. It also has
//     STAGECOACH_MODEL, STAGECOACH_ORT_LIB and STAGECOACH_POOL_THREADS, as a zygote has. It writes
//     to two empty memfds, which are its descriptors 4 (the graph) and 5 (the weights). It ends
//     with status 0, or with another status and a line on stderr with the reason.
//   - Then the creator of the memfds seals them.
//   - A process that has them as the same descriptors loads the model with [Options.Mapped]. ONNX
//     Runtime maps the weights privately, so the pages are shared as long as no process writes to
//     them.
//
// # Refused messages
//
// ZygoteError usually has the id of its fork order. Two ids are special:
//   - 0: loading has failed, and the zygote ends. The reason is 1 if only forking is impossible.
//   - 2³²−1: the order was no fork order, or was too short to have an id.
//
// A kill of a child that has been reaped is ignored.
package zygote

/*
#cgo CFLAGS: -O2 -Wall -Wextra -Wdeprecated-declarations -I${SRCDIR}/../../internal/third_party/onnxruntime
#cgo LDFLAGS: -ldl -lpthread
#include <stdlib.h>
#include "zygote.h"
*/
import "C"

import (
	"strings"
	"unsafe"
)

// Child reports whether this process was forked by a zygote. It returns the descriptor of the stage
// socket, and the environment of the fork order as KEY=VALUE strings. The caller must set these
// variables itself, because they are not in Go's environment.
func Child() (fd int, env []string, ok bool) {
	if C.sc_child_fd < 0 {
		return -1, nil, false
	}
	text := C.GoStringN(C.sc_child_env, C.int(C.sc_child_env_bytes))
	for s := range strings.SplitSeq(strings.TrimSuffix(text, "\x00"), "\x00") {
		if s != "" {
			env = append(env, s)
		}
	}
	return int(C.sc_child_fd), env, true
}

// Inherited returns the session that this process has from its zygote. It returns nil if no zygote
// has forked this process, or the zygote has no model. Each call returns a Session for the same
// model; close at most one of them.
func Inherited() *Session {
	if C.sc_child_fd < 0 || C.sc_inherited == nil {
		return nil
	}
	return newSession(C.sc_inherited)
}

// goError returns a message of the C side as text, and frees it.
func goError(message *C.char) string {
	defer C.free(unsafe.Pointer(message))
	return C.GoString(message)
}
