// Package zygote lets a stage binary load its model once and fork replicas of itself, each a normal Go process that
// already holds the session.
//
// Forking a running Go program is unsafe; forking before the Go runtime starts is not. A program that imports this
// package has a C constructor. When the environment names a control socket (wire.EnvZygoteFD), the constructor loads ONNX
// Runtime and the model while the process has one thread, says that it is ready, and serves fork orders (package wire,
// order.go) until the socket closes. Its Go main never runs. A forked child returns from the constructor into main:
//
//	if fd, env, ok := zygote.Child(); ok {
//		session := zygote.Inherited() // nil when the zygote has no model
//		… serve requests on the stage socket fd
//	}
//	session, err := zygote.Open(zygote.Options{…}) // an ordinary process
//
// # Environment of a zygote
//
//	STAGECOACH_ZYGOTE_FD     the control socket, SOCK_SEQPACKET; taken out of the environment
//	STAGECOACH_MODEL         the ONNX file; empty: the zygote has no session and forks all the same
//	STAGECOACH_ORT_LIB       ONNX Runtime's shared library, 1.24
//	STAGECOACH_POOL_THREADS  N, the most threads that one of its replicas can compute with; default: the CPUs it may use
//	STAGECOACH_PREPACKED     a folder for the model's pre-packed form, see below; empty: the model itself is loaded
//	STAGECOACH_SEALED        when set, processes of the same user cannot look into the zygote and its children, nor into any
//	                         other process of such a program
//
// # A child
//
// It is in the cgroups whose descriptors came with its order, entered before anything else. It has stdin, stdout, stderr and
// its stage socket open and no other descriptor, the zygote's environment, arguments and folder, and dies with the zygote
// (SIGKILL). Its random seeds are its own; its address layout is its siblings', so one
// zygote never serves two tenants.
//
// # Threads
//
// Threads do not survive a fork. A session is made for N threads, the calling one included, and the starts of the other N−1
// are recorded instead of done. An order for k threads starts min(k, N)−1 of them in the child, so that k threads compute:
// k = 0 and k = 1 start none. What the others would have done the calling thread does. [Session.AddThreads] starts more of
// them later. None are taken back: that is left to a cgroup's quota.
//
// # Pre-packed models
//
// In the folder that STAGECOACH_PREPACKED names, the zygote finds, or writes first, NAME.ort-VERSION.prepacked: the model
// as ONNX Runtime optimised it for this processor, its weights as the kernels want them, to be mapped instead of copied to
// the heap. The folder must hold what belongs to one model content on one kind of machine: the caller sees to that. When
// the file cannot be written or read, a line on stderr says why, and the model itself is loaded. ZygoteReady says which.
//
// Where no process can be forked, because its libraries start threads of their own, ordinary processes can share a
// pre-packed model too: one with STAGECOACH_PACK in its environment, and with STAGECOACH_MODEL, STAGECOACH_ORT_LIB and
// STAGECOACH_POOL_THREADS as a zygote, writes it to two empty files, memfds, that it has as descriptors 4 (the graph) and 5
// (the weights), and ends: 0, or another status and a line on stderr that says why. Then the files are sealed, and
// [Options.Mapped] in a process that has them as the same descriptors loads from them. ONNX Runtime maps the weights
// privately: as long as nobody writes, the pages are shared.
//
// # Messages that are refused
//
// ZygoteError carries the id of the fork order that it is about, 0 when loading failed and the zygote ends (with reason 1 when
// only the fork is impossible), and 2³²−1 for an order that was no fork order or too short to tell. A kill of a child that has
// been reaped is passed over in silence.
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

// Child says whether this process was forked by a zygote, and what its fork order gave it: the descriptor of its stage
// socket and its environment as KEY=VALUE strings. The Go runtime does not see that environment by itself.
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

// Inherited returns the session that this process has from its zygote; nil if it is no zygote's child or the zygote has
// no model. Each call returns a Session for the same model; close at most one of them.
func Inherited() *Session {
	if C.sc_child_fd < 0 || C.sc_inherited == nil {
		return nil
	}
	return newSession(C.sc_inherited)
}

// goError turns a message of the C side into text and frees it.
func goError(message *C.char) string {
	defer C.free(unsafe.Pointer(message))
	return C.GoString(message)
}
