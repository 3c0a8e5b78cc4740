package sandbox

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Numbers of <linux/seccomp.h>: results of a filter, and offsets in the filter's input.
const (
	allow     = 0x7fff0000
	refuse    = 0x00050000 // the low bits are the error number
	atNumber  = 0
	atMachine = 4
	atFirst   = 16 // lower half of the first argument
	x32       = 0x40000000
)

// noUserNamespaces keeps the calling thread and its descendants from creating a user namespace. In
// such a namespace, a process has all rights of root: for example, it could mount the cgroups that
// limit it and lift the limits. The filter also forbids the kernel's keys. They belong to a user
// and not to a namespace, so root in a sandbox would share them with root of the machine.
func noUserNamespaces() error {
	machine := map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}[runtime.GOARCH]
	if machine == 0 {
		return fmt.Errorf("no filter of system calls for %s, want amd64 or arm64", runtime.GOARCH)
	}
	const (
		load  = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS
		equal = unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K
		least = unix.BPF_JMP | unix.BPF_JGE | unix.BPF_K
		some  = unix.BPF_JMP | unix.BPF_JSET | unix.BPF_K
		end   = unix.BPF_RET | unix.BPF_K
	)
	program := []unix.SockFilter{
		{Code: load, K: atMachine},
		{Code: equal, Jf: 11, K: machine},
		{Code: load, K: atNumber},
		{Code: least, Jt: 9, K: x32},
		// A filter cannot read the flags of clone3, because they are in memory. Programs fall back to
		// clone.
		{Code: equal, Jt: 8, K: unix.SYS_CLONE3},
		{Code: equal, Jt: 8, K: unix.SYS_ADD_KEY},
		{Code: equal, Jt: 7, K: unix.SYS_REQUEST_KEY},
		{Code: equal, Jt: 6, K: unix.SYS_KEYCTL},
		{Code: equal, Jt: 1, K: unix.SYS_UNSHARE},
		{Code: equal, Jf: 2, K: unix.SYS_CLONE},
		{Code: load, K: atFirst},
		{Code: some, Jt: 2, K: unix.CLONE_NEWUSER},
		{Code: end, K: allow},
		{Code: end, K: refuse | uint32(unix.ENOSYS)},
		{Code: end, K: refuse | uint32(unix.EPERM)},
	}
	p := unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&p)), 0, 0); err != nil {
		return fmt.Errorf("filter of system calls: %w; want a kernel with seccomp", err)
	}
	runtime.KeepAlive(program)
	return nil
}
