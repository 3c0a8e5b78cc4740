package watchdog

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// listener is a TCP socket that listens in the network of this process.
type listener struct {
	at    netip.AddrPort
	only6 bool   // on the unspecified IPv6 address: it gets no IPv4 connections
	uid   uint32 // of the user who created it
	inode uint32
}

// answers reports whether the listener gets connections to this address of the machine.
func (l listener) answers(to netip.Addr) bool {
	at := l.at.Addr()
	if at.IsUnspecified() {
		return at.Is4() == to.Is4() || at.Is6() && !l.only6
	}
	return at.Unmap() == to
}

// Numbers and sizes in bytes from <linux/inet_diag.h>.
const (
	diagHeader   = 16
	diagRequest  = 56 // struct inet_diag_req_v2
	diagAnswer   = 72 // struct inet_diag_msg
	diagListen   = 1 << 10
	diagBytecode = 1  // INET_DIAG_REQ_BYTECODE
	diagSource   = 7  // INET_DIAG_BC_S_COND
	diagOnly6    = 11 // INET_DIAG_SKV6ONLY
	diagUnread   = 56 // idiag_rqueue in struct inet_diag_msg
)

// listeners returns the sockets that listen on a TCP port of any address; port 0 means any port. It
// asks the kernel over netlink, because reading /proc/net/tcp takes milliseconds: the kernel scans
// its whole connection table for it.
func listeners(port uint16) ([]listener, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, fmt.Errorf("list of listening sockets: %w", err)
	}
	defer unix.Close(fd)
	var all []listener
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		err := unix.Sendto(fd, diagQuestion(family, port), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
		if err == nil {
			all, err = diagAnswers(fd, all)
		}
		if errors.Is(err, unix.ENOENT) {
			err = fmt.Errorf("%w, want a kernel with CONFIG_INET_DIAG (its modules inet_diag and tcp_diag)", err)
		}
		if err != nil {
			return nil, fmt.Errorf("list of listening sockets: %w", err)
		}
	}
	return all, nil
}

// diagQuestion returns a request for the sockets of a family that listen on a port.
func diagQuestion(family byte, port uint16) []byte {
	b := make([]byte, diagHeader+diagRequest, diagHeader+diagRequest+16)
	binary.NativeEndian.PutUint16(b[4:], unix.SOCK_DIAG_BY_FAMILY)
	binary.NativeEndian.PutUint16(b[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	b[diagHeader], b[diagHeader+1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(b[diagHeader+4:], diagListen)
	// A filter of one instruction. It jumps by 12 bytes if the port matches, else past the end.
	if port != 0 {
		b = append(b, make([]byte, 16)...)
		a := b[diagHeader+diagRequest:]
		binary.NativeEndian.PutUint16(a, uint16(len(a)))
		binary.NativeEndian.PutUint16(a[2:], diagBytecode)
		a[4], a[5] = diagSource, 12
		binary.NativeEndian.PutUint16(a[6:], 16)
		// a[8] and a[9]: any family and address.
		binary.NativeEndian.PutUint32(a[12:], uint32(port))
	}
	binary.NativeEndian.PutUint32(b, uint32(len(b)))
	return b
}

// diagAnswers appends the sockets that the kernel reports.
func diagAnswers(fd int, all []listener) ([]listener, error) {
	buf := make([]byte, 8<<10) // the kernel's default message size
	for {
		n, _, err := unix.Recvfrom(fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for b := buf[:n]; len(b) >= diagHeader; {
			size := int(binary.NativeEndian.Uint32(b))
			if size < diagHeader || size > len(b) {
				return nil, fmt.Errorf("a netlink message of %d bytes in a packet of %d bytes", size, len(b))
			}
			m := b[diagHeader:size]
			switch kind := binary.NativeEndian.Uint16(b[4:]); {
			case kind == unix.NLMSG_DONE:
				return all, nil
			case kind == unix.NLMSG_ERROR && len(m) >= 4:
				return nil, unix.Errno(-int32(binary.NativeEndian.Uint32(m)))
			case kind == unix.SOCK_DIAG_BY_FAMILY && len(m) >= diagAnswer:
				all = append(all, diagListener(m))
			}
			b = b[min((size+3)&^3, len(b)):]
		}
	}
}

// diagListener decodes a struct inet_diag_msg and its attributes.
func diagListener(m []byte) listener {
	at := netip.AddrFrom4([4]byte(m[8:12]))
	if m[0] == unix.AF_INET6 {
		at = netip.AddrFrom16([16]byte(m[8:24]))
	}
	l := listener{
		at:  netip.AddrPortFrom(at, binary.BigEndian.Uint16(m[4:])),
		uid: binary.NativeEndian.Uint32(m[64:]), inode: binary.NativeEndian.Uint32(m[68:]),
	}
	for a := m[diagAnswer:]; len(a) >= 4; {
		size := int(binary.NativeEndian.Uint16(a))
		if size < 4 || size > len(a) {
			break
		}
		if binary.NativeEndian.Uint16(a[2:]) == diagOnly6 && size > 4 {
			l.only6 = a[4] != 0
		}
		a = a[min((size+3)&^3, len(a)):]
	}
	return l
}

// unread returns how many bytes the other end of a TCP connection on this machine has not read yet.
func unread(c net.Conn) (int, error) {
	here, ok1 := c.LocalAddr().(*net.TCPAddr)
	there, ok2 := c.RemoteAddr().(*net.TCPAddr)
	if !ok1 || !ok2 {
		return 0, fmt.Errorf("connection of type %T, want TCP", c)
	}
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return 0, fmt.Errorf("unread bytes of a connection: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, diagPeer(here.AddrPort(), there.AddrPort()), 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, fmt.Errorf("unread bytes of a connection: %w", err)
	}
	buf := make([]byte, 8<<10)
	n, _, err := unix.Recvfrom(fd, buf, 0)
	if err != nil {
		return 0, fmt.Errorf("unread bytes of a connection: %w", err)
	}
	if n < diagHeader+diagAnswer || binary.NativeEndian.Uint16(buf[4:]) != unix.SOCK_DIAG_BY_FAMILY {
		return 0, fmt.Errorf("unread bytes of a connection: the kernel knows no connection from %v to %v", there, here)
	}
	return int(binary.NativeEndian.Uint32(buf[diagHeader+diagUnread:])), nil
}

// diagPeer returns a request for the socket at the other end of the connection from here to there.
func diagPeer(here, there netip.AddrPort) []byte {
	b := make([]byte, diagHeader+diagRequest)
	binary.NativeEndian.PutUint32(b, uint32(len(b)))
	binary.NativeEndian.PutUint16(b[4:], unix.SOCK_DIAG_BY_FAMILY)
	binary.NativeEndian.PutUint16(b[6:], unix.NLM_F_REQUEST)
	q := b[diagHeader:]
	q[0], q[1] = unix.AF_INET, unix.IPPROTO_TCP
	from, to := there.Addr().Unmap(), here.Addr().Unmap()
	if from.Is6() {
		q[0] = unix.AF_INET6
	}
	binary.NativeEndian.PutUint32(q[4:], ^uint32(0)) // in any state
	binary.BigEndian.PutUint16(q[8:], there.Port())
	binary.BigEndian.PutUint16(q[10:], here.Port())
	copy(q[12:28], from.AsSlice())
	copy(q[28:44], to.AsSlice())
	for i := 48; i < 56; i++ {
		q[i] = 0xff // no cookie
	}
	return b
}
