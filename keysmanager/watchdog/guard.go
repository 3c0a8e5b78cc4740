package watchdog

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// guard makes sure that only the replica's own processes answer on the program's port. In the
// machine's network, every replica can listen on every port.
//
// After a connection is made, guard looks at all sockets that listen on the port. If guard already
// knew each of them as the replica's socket before the connection, the connection is the program's.
// A socket keeps its port as long as it listens, so no other process can have accepted the
// connection. If another process shares the port (SO_REUSEPORT), its socket is listed, too.
type guard struct {
	at    url.URL // address where the program should listen
	port  uint16
	hosts []netip.Addr
	lock  *net.UnixConn // see claim; nil: not claimed

	// root is the process from which the program and all that it starts descend: this process, or the
	// first process of the program's container.
	root int

	mu    sync.Mutex
	known map[uint32]bool // inodes of the replica's sockets; replaced, never modified

	once  sync.Once
	taken chan struct{} // closed when another process was found on the port; then why is set
	why   error
}

// newGuard returns the guard of a program that should listen at the URL. Its host must be a
// loopback address or localhost.
func newGuard(at url.URL) (*guard, error) {
	port, err := strconv.ParseUint(at.Port(), 10, 16)
	if err != nil || port == 0 {
		return nil, fmt.Errorf("%s: port %q, want 1 to 65535", &at, at.Port())
	}
	g := &guard{at: at, port: uint16(port), root: os.Getpid(), taken: make(chan struct{})}
	switch at.Hostname() {
	case "127.0.0.1":
		g.hosts = []netip.Addr{loopback}
	case "::1":
		g.hosts = []netip.Addr{netip.IPv6Loopback()}
	default: // localhost; see upstream
		g.hosts = []netip.Addr{loopback, netip.IPv6Loopback()}
	}
	return g, nil
}

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// takenError says which process or function has the program's port.
type takenError struct{ text string }

func (e takenError) Error() string { return e.text }

// takenBy returns a takenError and marks the port as taken.
func (g *guard) takenBy(who string) error {
	err := takenError{fmt.Sprintf("%s is taken by %s, and functions in the machine's network share its ports: "+
		"want a program that listens on the port that the environment variable port names, or a port of its own in upstream_url", &g.at, who)}
	g.once.Do(func() {
		g.why = err
		close(g.taken)
	})
	return err
}

// claim reserves the port among the replicas of this network, and checks that no process listens on
// it. If two replicas start at the same time, exactly one gets the port, even if both programs
// could listen on it at once. The reservation ends with close, or with this process.
func (g *guard) claim() error {
	// An abstract socket belongs to the network, not to a folder.
	name := fmt.Sprintf("@stagecoach/port/%d", g.port)
	lock, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Net: "unixgram", Name: name})
	if errors.Is(err, unix.EADDRINUSE) {
		return g.takenBy(binder(name))
	}
	if err != nil {
		return fmt.Errorf("%s: %w", &g.at, err)
	}
	g.lock = lock
	if err := g.free(); err != nil {
		g.close()
		return err
	}
	return nil
}

func (g *guard) close() {
	if g.lock != nil {
		_ = g.lock.Close()
	}
}

// binder describes the process that has bound a unix socket to a name.
func binder(name string) string {
	const unknown = "another replica, which cannot be looked into from here"
	b, _ := os.ReadFile("/proc/net/unix") // without the file, nobody is found
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line) // …, inode, path
		if len(f) != 8 || f[7] != name {
			continue
		}
		inode, err := strconv.ParseUint(f[6], 10, 32)
		if err != nil {
			continue
		}
		procs := readProcesses()
		if pid := procs.holder(uint32(inode)); pid != 0 {
			return procs.describe(pid)
		}
	}
	return unknown
}

// listening returns the sockets that connections to the program's port can reach.
func (g *guard) listening() ([]listener, error) {
	all, err := listeners(g.port)
	return slices.DeleteFunc(all, func(l listener) bool { return !slices.ContainsFunc(g.hosts, l.answers) }), err
}

// free returns an error if a process listens on the port. It is called before the program is
// started.
func (g *guard) free() error {
	all, err := g.listening()
	if err != nil || len(all) == 0 {
		return err
	}
	return g.takenBy(ownerOf(all[0]))
}

// listensAt returns where the replica's processes listen, as part of an error text. It returns ""
// if they listen nowhere, or on the wanted port.
func (p *child) listensAt() string {
	var all []listener
	var err error
	if entered := sandbox.InNetwork(p.network, func() { all, err = listeners(0) }); entered != nil || err != nil {
		return "" // it is only a hint
	}
	port := p.at.Port()
	own := readProcesses().sockets(p.root)
	var where []string
	upstream := ""
	for _, l := range all {
		if !own[l.inode] {
			continue
		}
		number := strconv.Itoa(int(l.at.Port()))
		text, host := number, ""
		switch at := l.at.Addr().Unmap(); {
		case at.IsUnspecified() && l.only6, at == netip.IPv6Loopback():
			host = "::1"
		case at.IsUnspecified(), at == loopback:
			host = "127.0.0.1"
		default:
			text = l.at.String()
		}
		if number == port && host != "" {
			return ""
		}
		where = append(where, text)
		if upstream == "" && host != "" {
			upstream = ", or say upstream_url=http://" + net.JoinHostPort(host, number)
		}
	}
	if len(where) == 0 {
		return ""
	}
	slices.Sort(where)
	return fmt.Sprintf("it listens on %s; want %s%s", strings.Join(slices.Compact(where), " and "), port, upstream)
}

// ownerOf describes the process that owns a listener.
func ownerOf(l listener) string {
	procs := readProcesses()
	if pid := procs.holder(l.inode); pid != 0 {
		return procs.describe(pid)
	}
	return fmt.Sprintf("a process of user %d", l.uid)
}

// look returns the inodes of the sockets that listen on the port, or nothing if there are none. It
// returns a takenError if one of them does not belong to the replica.
func (g *guard) look() (map[uint32]bool, error) {
	g.mu.Lock()
	known := g.known
	g.mu.Unlock()
	var unsettled listener
	for range tries {
		all, err := g.listening()
		if err != nil {
			return nil, err
		}
		now := map[uint32]bool{}
		var others []listener
		for _, l := range all {
			if now[l.inode] = true; !known[l.inode] {
				others = append(others, l)
			}
		}
		settled := true
		if len(others) > 0 {
			if settled, err = g.checkOwners(others); err != nil {
				return nil, err
			}
			unsettled = others[0]
		}
		if settled {
			g.mu.Lock()
			g.known = now
			g.mu.Unlock()
			return now, nil
		}
		time.Sleep(changing) // after this, the list of sockets and /proc agree again
	}
	return nil, g.takenBy(fmt.Sprintf("a process of user %d, which cannot be looked into from here", unsettled.uid))
}

// look repeats while sockets come, go, or move between processes: at most tries times, with pauses.
const (
	tries    = 10
	changing = 5 * time.Millisecond
)

// checkOwners searches /proc for the owners of the listeners. It returns true if all belong to the
// replica, false if an owner was not found, and a takenError if another process owns one.
func (g *guard) checkOwners(all []listener) (bool, error) {
	procs := readProcesses()
	own := procs.sockets(g.root)
	settled := true
	for _, l := range all {
		if own[l.inode] {
			continue
		}
		// The socket was just closed, or belongs to a process that was just started.
		settled = false
		pid := procs.holder(l.inode)
		if pid == 0 {
			continue
		}
		// Read again, because processes may have ended during the first read.
		if procs = readProcesses(); !slices.Contains(procs.ours(g.root), pid) {
			return false, g.takenBy(procs.describe(pid))
		}
	}
	return settled, nil
}

// dial connects to the program. It returns a takenError if another process listens on the port.
func (g *guard) dial(ctx context.Context, network, address string) (net.Conn, error) {
	for range tries {
		g.mu.Lock()
		before := g.known
		g.mu.Unlock()
		if len(before) == 0 {
			var err error
			if before, err = g.look(); err != nil {
				return nil, err
			}
		}
		if len(before) == 0 {
			return nil, g.refused(network)
		}
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		after, err := g.look()
		if err == nil && len(after) == 0 {
			err = g.refused(network)
		}
		if err != nil {
			_ = conn.Close()
			return nil, err
		}
		same := true
		for inode := range after {
			same = same && before[inode]
		}
		if same {
			return conn, nil
		}
		_ = conn.Close() // a process that no longer listens may have accepted it
	}
	return nil, fmt.Errorf("%s: the sockets that listen there change all the time", &g.at)
}

func (g *guard) refused(network string) error {
	return &net.OpError{Op: "dial", Net: network, Err: os.NewSyscallError("connect", unix.ECONNREFUSED)}
}
