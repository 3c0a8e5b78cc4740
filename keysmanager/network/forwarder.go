package network

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"github.com/google/nftables"
	"golang.org/x/net/dns/dnsmessage"
	"golang.org/x/sys/unix"
)

// Bounds of the forwarder.
const (
	maxQuery       = 4 << 10          // bytes
	maxQueries     = 256              // concurrent queries over UDP
	maxQueriesEach = 32               // per replica
	maxConns       = 64               // concurrent connections over TCP
	maxConnsEach   = 8                // per replica
	serverPatience = 2 * time.Second  // wait before the next server is asked
	connPatience   = 10 * time.Second // how long a silent replica's connection stays open
)

const dnsPort = 53

// forwarder answers replicas' DNS queries by asking the machine's resolvers. It caches nothing.
type forwarder struct {
	slice   netip.Prefix
	gateway netip.Addr
	in      func(func() error) error // the namespace of Open
	log     *slog.Logger
	udp     *net.UDPConn
	tcp     net.Listener
	ctx     context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup
	servers servers
	queries quota
	conns   quota
}

// startResolver starts the forwarder. If another process listens on port 53 of all addresses,
// replicas that need the forwarder ask that process instead.
func (n *Networks) startResolver() error {
	f := &forwarder{
		slice: n.slice, gateway: n.Gateway(), in: n.in, log: n.log, servers: servers{name: n.c.resolvConf},
		queries: quota{all: maxQueries, each: maxQueriesEach}, conns: quota{all: maxConns, each: maxConnsEach},
	}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	err := f.listen()
	switch {
	case err == nil:
		n.resolver = f
	case errors.Is(err, unix.EADDRINUSE):
		c, err := readResolvConf(n.c.resolvConf)
		if err != nil {
			return err
		}
		if !n.needsForwarder(c) {
			return nil
		}
		n.log.Warn("another process listens on port 53 of all addresses: replicas ask it for names, and it has to answer them", "address", n.Gateway())
		n.foreignResolver = true
	default:
		return fmt.Errorf("resolver of replicas: %w", err)
	}
	if err := n.firewall.admit(false, n.ownEntries()...); err != nil {
		return fmt.Errorf("resolver of replicas: %w", err)
	}
	return nil
}

// ownEntries returns what replicas always reach: the resolver.
func (n *Networks) ownEntries() []nftables.SetElement {
	if n.resolver == nil && !n.foreignResolver {
		return nil
	}
	at := netip.AddrPortFrom(n.Gateway(), dnsPort)
	return []nftables.SetElement{element(unix.IPPROTO_UDP, at), element(unix.IPPROTO_TCP, at)}
}

func (f *forwarder) listen() error {
	at := netip.AddrPortFrom(f.gateway, dnsPort)
	err := f.in(func() (err error) {
		if f.udp, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(at)); err != nil {
			return err
		}
		if f.tcp, err = net.ListenTCP("tcp4", net.TCPAddrFromAddrPort(at)); err != nil {
			_ = f.udp.Close() // nothing was written
		}
		return err
	})
	if err != nil {
		return err
	}
	f.running.Go(f.serveUDP)
	f.running.Go(f.serveTCP)
	return nil
}

// close ends the forwarder and waits for it.
func (f *forwarder) close() {
	f.cancel()
	_ = f.udp.Close()
	_ = f.tcp.Close()
	f.running.Wait()
}

// isReplica reports whether a query comes from a replica of the slice. Queries of the machine's own
// processes are not answered, because they have other resolvers.
func (f *forwarder) isReplica(a netip.Addr) bool {
	return f.slice.Contains(a.Unmap()) && a.Unmap() != f.gateway
}

func (f *forwarder) serveUDP() {
	b := make([]byte, maxQuery+1)
	for {
		size, from, err := f.udp.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || size > maxQuery || !f.isReplica(from.Addr()) || !f.queries.take(from.Addr()) {
			continue // the client will ask again
		}
		query := append([]byte(nil), b[:size]...)
		f.running.Go(func() {
			defer f.queries.give(from.Addr())
			if reply := f.answer("udp4", query); reply != nil {
				_, _ = f.udp.WriteToUDPAddrPort(reply, from) // the replica may have ended
			}
		})
	}
}

func (f *forwarder) serveTCP() {
	for {
		c, err := f.tcp.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			f.log.Warn("resolver of replicas: accept", "err", err)
			select {
			case <-time.After(100 * time.Millisecond): // descriptors may be short
			case <-f.ctx.Done():
			}
			continue
		}
		from := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
		if !f.isReplica(from) || !f.conns.take(from) {
			_ = c.Close()
			continue
		}
		f.running.Go(func() {
			defer f.conns.give(from)
			f.serveConn(c)
		})
	}
}

// serveConn answers the queries of a connection one after another.
func (f *forwarder) serveConn(c net.Conn) {
	defer c.Close()
	defer context.AfterFunc(f.ctx, func() { _ = c.Close() })()
	for {
		_ = c.SetDeadline(time.Now().Add(connPatience)) // of an open connection: no error
		query, err := readMessage(c, maxQuery)
		if err != nil {
			return
		}
		reply := f.answer("tcp4", query)
		if reply == nil || writeMessage(c, reply) != nil {
			return
		}
	}
}

// answer returns the reply to a query, or nil if it is not a query.
func (f *forwarder) answer(over string, query []byte) []byte {
	var p dnsmessage.Parser
	h, err := p.Start(query)
	if err != nil || h.Response {
		return nil
	}
	question, err := p.Question()
	if err != nil {
		return nil
	}
	for _, s := range f.servers.list() {
		if reply, err := f.ask(over, netip.AddrPortFrom(s, dnsPort), query, h.ID); err == nil {
			return reply
		}
		if f.ctx.Err() != nil {
			return nil
		}
	}
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: h.ID, Response: true, RecursionDesired: h.RecursionDesired, RecursionAvailable: true, RCode: dnsmessage.RCodeServerFailure})
	if b.StartQuestions() != nil || b.Question(question) != nil {
		return nil
	}
	reply, err := b.Finish()
	if err != nil {
		return nil
	}
	return reply
}

// ask sends a query to one server over a new socket, whose port the kernel chooses, and returns the
// reply.
func (f *forwarder) ask(over string, server netip.AddrPort, query []byte, id uint16) ([]byte, error) {
	ctx, cancel := context.WithTimeout(f.ctx, serverPatience)
	defer cancel()
	if server.Addr().Is6() {
		over = over[:3] + "6"
	}
	var c net.Conn
	err := f.in(func() (err error) {
		c, err = (&net.Dialer{}).DialContext(ctx, over, server.String())
		return err
	})
	if err != nil {
		return nil, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if over[:3] == "tcp" {
		if err := writeMessage(c, query); err != nil {
			return nil, err
		}
		return readMessage(c, 64<<10)
	}
	if _, err := c.Write(query); err != nil {
		return nil, err
	}
	for b := make([]byte, 64<<10); ; {
		size, err := c.Read(b)
		if err != nil {
			return nil, err
		}
		// Only a response with the query's id is returned.
		if size > 3 && binary.BigEndian.Uint16(b) == id && b[2]&0x80 != 0 {
			return b[:size], nil
		}
	}
}

// readMessage reads a message from a TCP connection. It begins with its size.
func readMessage(c net.Conn, most int) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(c, size[:]); err != nil {
		return nil, err
	}
	n := int(binary.BigEndian.Uint16(size[:]))
	if n > most {
		return nil, fmt.Errorf("message of %d bytes, want at most %d", n, most)
	}
	b := make([]byte, n)
	_, err := io.ReadFull(c, b)
	return b, err
}

func writeMessage(c net.Conn, b []byte) error {
	_, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...))
	return err
}

// servers are the machine's resolvers, from a file that may change.
type servers struct {
	name string

	mu   sync.Mutex
	seen os.FileInfo
	last []netip.Addr
}

// list returns the servers. It reads the file again if it has changed.
func (s *servers) list() []netip.Addr {
	s.mu.Lock()
	defer s.mu.Unlock()
	info, err := os.Stat(s.name)
	if err == nil && s.seen != nil && os.SameFile(info, s.seen) && info.ModTime().Equal(s.seen.ModTime()) && info.Size() == s.seen.Size() {
		return s.last
	}
	c, err := readResolvConf(s.name)
	if err != nil {
		return s.last
	}
	s.seen, s.last = info, c.servers
	return s.last
}

// quota counts running operations, in total and per replica.
type quota struct {
	all, each int

	mu    sync.Mutex
	total int
	of    map[netip.Addr]int
}

// take reports whether one more operation is allowed. The caller returns it later.
func (q *quota) take(a netip.Addr) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.total >= q.all || q.of[a] >= q.each {
		return false
	}
	if q.of == nil {
		q.of = map[netip.Addr]int{}
	}
	q.total++
	q.of[a]++
	return true
}

func (q *quota) give(a netip.Addr) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.total--
	if q.of[a]--; q.of[a] == 0 {
		delete(q.of, a)
	}
}
