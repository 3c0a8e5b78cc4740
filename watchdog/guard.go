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
)

// guard makes sure that only the replica's own processes answer on the program's port. In the
// machine's network, every replica can listen on every port.
//
// A connection is the program's if each socket that listens on the port right after the connection
// was made is known, from before, to belong to the replica. A socket keeps its port for as long as
// it listens, so no other process can have accepted the connection. Sockets that share the port
// (SO_REUSEPORT) are listed beside it.
type guard struct {
	at    url.URL // where the program is to listen
	port  uint16
	hosts []netip.Addr
	lock  *net.UnixConn // see claim; nil: none

	mu    sync.Mutex
	known map[uint32]bool // inodes of sockets that belong to the replica; replaced, never changed

	once  sync.Once
	taken chan struct{} // closed when another process was found on the port; then why is set
	why   error
}

// newGuard returns the guard of a program that is to listen at the URL, whose host is a loopback
// address or localhost.
func newGuard(at url.URL) (*guard, error) {
	port, err := strconv.ParseUint(at.Port(), 10, 16)
	if err != nil || port == 0 {
		return nil, fmt.Errorf("%s: port %q, want 1 to 65535", &at, at.Port())
	}
	g := &guard{at: at, port: uint16(port), taken: make(chan struct{})}
	switch at.Hostname() {
	case "127.0.0.1":
		g.hosts = []netip.Addr{loopback}
	case "::1":
		g.hosts = []netip.Addr{netip.IPv6Loopback()}
	default: // localhost, see upstream
		g.hosts = []netip.Addr{loopback, netip.IPv6Loopback()}
	}
	return g, nil
}

var loopback = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// takenError is the error that names the process or function that has the program's port.
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

// claim reserves the port among the replicas of this network and checks that no process listens on
// it. If two replicas start at the same time, exactly one gets the port, even if both programs
// could listen there. The reservation ends with close, or with this process.
func (g *guard) claim() error {
	name := fmt.Sprintf("@stagecoach/port/%d", g.port) // abstract: in the network, and in no folder
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

// binder describes the process that has a unix socket bound to a name.
func binder(name string) string {
	const unknown = "another replica, which cannot be looked into from here"
	b, _ := os.ReadFile("/proc/net/unix") // without it nobody is found
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

// free returns an error if somebody listens on the port, before the program is started.
func (g *guard) free() error {
	all, err := g.listening()
	if err != nil || len(all) == 0 {
		return err
	}
	return g.takenBy(whose(all[0]))
}

// elsewhere returns where the replica's processes listen, as part of an error. It is empty if they
// listen nowhere, or on the port that is wanted.
func (p *child) elsewhere() string {
	all, err := listeners(0)
	if err != nil {
		return "" // only a hint
	}
	port := p.at.Port()
	own := readProcesses().sockets(os.Getpid())
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

// whose describes the process that holds a listener.
func whose(l listener) string {
	procs := readProcesses()
	if pid := procs.holder(l.inode); pid != 0 {
		return procs.describe(pid)
	}
	return fmt.Sprintf("a process of user %d", l.uid)
}

// look returns the inodes of the sockets that listen on the port; empty: none does. It returns a
// takenError if one of them does not belong to the replica.
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
			if settled, err = g.tell(others); err != nil {
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
		time.Sleep(changing) // then the socket list and /proc agree again
	}
	return nil, g.takenBy(fmt.Sprintf("a process of user %d, which cannot be looked into from here", unsettled.uid))
}

// look repeats while sockets come and go, or move from process to process: at most tries times,
// with a pause in between.
const (
	tries    = 10
	changing = 5 * time.Millisecond
)

// tell searches /proc for the owners of the listeners. It returns true if all belong to the
// replica, false if an owner was not found, and a takenError if another process owns one.
func (g *guard) tell(all []listener) (bool, error) {
	procs := readProcesses()
	own := procs.sockets(os.Getpid())
	settled := true
	for _, l := range all {
		if own[l.inode] {
			continue
		}
		settled = false // the socket was closed just now, or is in a process that was started just now
		pid := procs.holder(l.inode)
		if pid == 0 {
			continue
		}
		if procs = readProcesses(); !slices.Contains(procs.ours(os.Getpid()), pid) { // read again: processes may have ended during the first time
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
