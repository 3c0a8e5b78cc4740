package sandbox

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Apart is a Runtime whose processes are in networks that this process is not in, such as pods of
// Kubernetes.
type Apart interface {
	Runtime
	// Network returns the network namespace of a process that this Runtime has started. The caller
	// closes it.
	Network(of Process) (*os.File, error)
	// Room makes a container in which several commands run. c says what they have in common: all but
	// arguments, environment and descriptors. The caller closes the Room.
	Room(ctx context.Context, c Command) (Room, error)
}

// Room is a Runtime that starts processes in one container.
type Room interface {
	Runtime
	// Ended is closed once the container has ended.
	Ended() <-chan struct{}
}

// InNetwork runs f on a thread that is in a network namespace; nil: in that of this process.
// Sockets that f makes stay in that network. f must make them on its own goroutine.
func InNetwork(network *os.File, f func()) error {
	if network == nil {
		f()
		return nil
	}
	raw, err := network.SyscallConn()
	if err != nil {
		return err
	}
	onThread(func() {
		closed := raw.Control(func(fd uintptr) { err = unix.Setns(int(fd), unix.CLONE_NEWNET) })
		if err = errors.Join(closed, err); err == nil {
			f()
		}
	})
	if err != nil {
		return fmt.Errorf("enter the network of a process: %w", err)
	}
	return nil
}

// DialIn connects to an address of a network namespace; nil: of that of this process.
func DialIn(ctx context.Context, in *os.File, network, address string) (conn net.Conn, err error) {
	if in == nil {
		return (&net.Dialer{}).DialContext(ctx, network, address)
	}
	d := net.Dialer{FallbackDelay: -1} // it would use a goroutine of its own, on another thread
	if entered := InNetwork(in, func() { conn, err = d.DialContext(ctx, network, address) }); entered != nil {
		return nil, entered
	}
	return conn, err
}
