package network

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// onThread runs f on a new thread that ends with f, so that f may change the thread's namespace.
// The thread is never the process's first one, which cannot end.
func onThread(f func() error) error {
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		// Never unlocked, so the thread ends with this goroutine; the exception is below.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			err = onThread(f) // on another thread, because this one is locked
			runtime.UnlockOSThread()
			return
		}
		err = f()
	}()
	<-done
	return err
}

// current opens the network namespace of the calling thread.
func current() (*os.File, error) {
	return os.Open("/proc/thread-self/ns/net")
}

// same reports whether two files are the same namespace.
func same(a, b string) bool {
	x, errX := os.Stat(a)
	y, errY := os.Stat(b)
	return errX == nil && errY == nil && os.SameFile(x, y)
}

// in runs f in the network namespace that n was opened in.
func (n *Networks) in(f func() error) error {
	if n.foreign == nil {
		return f()
	}
	return onThread(func() error {
		if err := unix.Setns(int(n.foreign.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter the network namespace of Open: %w", err)
		}
		return f()
	})
}

// sysctls are the settings of a new namespace. The first two let processes without privileges
// listen on ports below 1024 and send ICMP echo requests, which is harmless in a separate
// namespace. The last two leave IPv6 on for loopback only.
var sysctls = [][2]string{
	{"net/ipv4/ip_unprivileged_port_start", "0"},
	{"net/ipv4/ping_group_range", "0 2147483647"},
	{"net/ipv6/conf/default/disable_ipv6", "1"},
	{"net/ipv6/conf/lo/disable_ipv6", "0"},
}

// setSysctl writes a setting of the calling thread's namespace.
func setSysctl(key, value string) error {
	f, err := os.OpenFile("/proc/sys/"+key, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}

// Lonely returns a new network namespace that has only a loopback link. It does not need a
// [Networks]. The caller starts a process in the namespace and closes the file. The error is
// [ErrUnavailable] if this process may not create namespaces.
func Lonely() (*os.File, error) {
	var ns *os.File
	err := onThread(func() error {
		file, h, err := newNamespace()
		if err != nil {
			return err
		}
		h.Close()
		ns = file
		return nil
	})
	return ns, err
}

// newNamespace moves the calling thread to a new namespace whose loopback is up. The caller closes
// the file and the handle, which works in the new namespace.
func newNamespace() (_ *os.File, _ *netlink.Handle, err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return nil, nil, unavailable("create a network namespace", err)
	}
	ns, err := current()
	if err != nil {
		return nil, nil, fmt.Errorf("new network namespace: %w", err)
	}
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		ns.Close()
		return nil, nil, fmt.Errorf("new network namespace: netlink: %w", err)
	}
	defer func() {
		if err != nil {
			ns.Close()
			h.Close()
		}
	}()
	for _, s := range sysctls {
		// The file of an IPv6 setting does not exist if the kernel has no IPv6.
		if err := setSysctl(s[0], s[1]); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, nil, unavailable("new network namespace", err)
		}
	}
	if err := h.LinkSetUp(&netlink.Device{LinkAttrs: netlink.LinkAttrs{Index: 1, Name: "lo"}}); err != nil {
		return nil, nil, fmt.Errorf("new network namespace: loopback: %w", err)
	}
	return ns, h, nil
}
