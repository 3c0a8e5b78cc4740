package network

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

func TestFilesOfReplicas(t *testing.T) {
	m := newMachine(t)
	n := m.open("a")
	const usable = "# ours\nnameserver 192.0.2.1\nsearch example.com\noptions ndots:2\n"
	const ours = "nameserver 10.231.0.1\n"
	for _, c := range []struct{ name, conf, want string }{
		{"all servers outside", usable, usable},
		{"one on loopback", usable + "nameserver 127.0.0.53\n", ours + "search example.com\noptions ndots:2\n"},
		{"one that is the machine", "nameserver " + machineAddr + "\n", ours},
		{"one that has IPv6 only", "nameserver 2001:db8::1\n", ours},
		{"one that replicas must not reach", "nameserver " + metadata + "\n", ours},
		{"none, which means loopback", "search example.com\n", ours + "search example.com\n"},
	} {
		m.resolvConf(c.conf)
		hosts, resolv, err := n.Files(netip.MustParseAddrPort("10.231.0.1:8080"))
		check(t, err)
		if got, err := os.ReadFile(resolv); err != nil || string(got) != c.want {
			t.Errorf("%s: resolv.conf %q, %v, want %q", c.name, got, err, c.want)
		}
		const want = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n10.231.0.1\tgateway.openfaas gateway gateway.openfaas.svc.cluster.local\n"
		if got, err := os.ReadFile(hosts); err != nil || string(got) != want {
			t.Errorf("%s: hosts %q, %v, want %q", c.name, got, err, want)
		}
		for _, name := range []string{hosts, resolv} {
			if info, err := os.Stat(name); err != nil || info.Mode().Perm() != 0o644 {
				t.Errorf("%s: %v, %v, want a file that all can read", name, info.Mode(), err)
			}
		}
	}
	if _, _, err := n.Files(netip.MustParseAddrPort("[::1]:8080")); err == nil {
		t.Error("a gateway with IPv6: no error")
	}
}

// serveDNS answers all address queries with answer until the test ends.
func (m *testMachine) serveDNS(at string, answer [4]byte) {
	m.t.Helper()
	var udp net.PacketConn
	var tcp net.Listener
	check(m.t, enter(m.home, func() (err error) {
		if udp, err = net.ListenPacket("udp4", at); err != nil {
			return err
		}
		tcp, err = net.Listen("tcp4", at)
		return err
	}))
	var running sync.WaitGroup
	m.t.Cleanup(func() { udp.Close(); tcp.Close(); running.Wait() })
	running.Go(func() {
		for b := make([]byte, 1500); ; {
			size, from, err := udp.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = udp.WriteTo(dnsReply(b[:size], answer), from)
		}
	})
	running.Go(func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				defer c.Close()
				if query, err := readMessage(c, 1500); err == nil {
					_ = writeMessage(c, dnsReply(query, answer))
				}
			})
		}
	})
}

func dnsReply(query []byte, answer [4]byte) []byte {
	var q dnsmessage.Message
	if q.Unpack(query) != nil {
		return nil
	}
	q.Response = true
	q.Answers = []dnsmessage.Resource{{
		Header: dnsmessage.ResourceHeader{Name: q.Questions[0].Name, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET},
		Body:   &dnsmessage.AResource{A: answer},
	}}
	b, _ := q.Pack()
	return b
}

// lookUp asks a server for a name from within a namespace. It returns the address or the error.
func (m *testMachine) lookUp(ns *os.File, network, server string) string {
	m.t.Helper()
	query, err := (&dnsmessage.Message{
		Header:    dnsmessage.Header{ID: 4711, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName("example.com."), Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}},
	}).Pack()
	check(m.t, err)
	c, err := m.dial(ns, network, server)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	var reply []byte
	if network == "udp" {
		if _, err = c.Write(query); err == nil {
			b := make([]byte, 1500)
			var size int
			size, err = c.Read(b)
			reply = b[:size]
		}
	} else if err = writeMessage(c, query); err == nil {
		reply, err = readMessage(c, 1500)
	}
	if err != nil {
		return err.Error()
	}
	var r dnsmessage.Message
	check(m.t, r.Unpack(reply))
	if r.ID != 4711 || len(r.Questions) != 1 || len(r.Answers) != 1 {
		return fmt.Sprintf("id %d, %v, %d questions, %d answers", r.ID, r.RCode, len(r.Questions), len(r.Answers))
	}
	return netip.AddrFrom4(r.Answers[0].Body.(*dnsmessage.AResource).A).String()
}

func TestReplicasResolveByAServerOnTheMachinesLoopback(t *testing.T) {
	m := newMachine(t)
	m.serveDNS("127.0.0.53:53", [4]byte{1, 1, 1, 1})
	m.serveDNS("127.0.0.54:53", [4]byte{2, 2, 2, 2})
	m.resolvConf("nameserver 127.0.0.53\n")
	n, other := m.open("a"), m.open("b")
	ns := m.create(n)
	server := netip.AddrPortFrom(n.Gateway(), dnsPort).String()
	want := func(network, want string) {
		t.Helper()
		if got := m.lookUp(ns, network, server); got != want {
			t.Errorf("over %s: %s, want %s", network, got, want)
		}
	}
	want("udp", "1.1.1.1")
	want("tcp", "1.1.1.1")
	m.resolvConf("nameserver 127.0.0.54\n")
	want("udp", "2.2.2.2")
	want("tcp", "2.2.2.2")
	m.resolvConf("nameserver 127.0.0.55\nnameserver 127.0.0.53\n") // nobody listens on the first
	want("udp", "1.1.1.1")
	want("tcp", "1.1.1.1")
	m.resolvConf("nameserver 127.0.0.55\n")
	want("udp", "id 4711, RCodeServerFailure, 1 questions, 0 answers")
	want("tcp", "id 4711, RCodeServerFailure, 1 questions, 0 answers")
	m.wantRefused(ns, "tcp", netip.AddrPortFrom(other.Gateway(), dnsPort).String())
	check(t, n.Admit(netip.AddrPortFrom(n.Gateway(), 8080)))
	m.resolvConf("nameserver 127.0.0.53\n")
	want("udp", "1.1.1.1") // what is admitted does not replace the resolver

	// The forwarder does not answer the machine's own processes, which have other resolvers.
	if got := m.lookUp(m.home, "tcp", server); got != io.EOF.Error() && !strings.Contains(got, "reset") {
		t.Errorf("the machine's own process gets %s, want its connection closed", got)
	}
}

func TestServerOnPort53OfAllAddressesAnswersReplicas(t *testing.T) {
	m := newMachine(t)
	m.serveDNS("0.0.0.0:53", [4]byte{3, 3, 3, 3})
	m.resolvConf("nameserver 127.0.0.1\n")
	n := m.open("a")
	ns := m.create(n)
	server := netip.AddrPortFrom(n.Gateway(), dnsPort).String()
	if got := m.lookUp(ns, "tcp", server); got != "3.3.3.3" {
		t.Errorf("the machine's server answers %s, want 3.3.3.3", got)
	}
	if s := m.log.String(); !strings.Contains(s, "port 53") {
		t.Errorf("log %s does not say who answers", s)
	}
	m.resolvConf("nameserver 192.0.2.1\n") // replicas need nobody on the machine
	m.wantRefused(m.create(m.open("b")), "tcp", "10.231.16.1:53")
}

func TestQuotaIsSharedByReplicas(t *testing.T) {
	q := quota{all: 3, each: 2}
	a, b, c := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("10.0.0.2"), netip.MustParseAddr("10.0.0.3")
	for i, step := range []struct {
		of   netip.Addr
		want bool
	}{{a, true}, {a, true}, {a, false}, {b, true}, {c, false}} {
		if got := q.take(step.of); got != step.want {
			t.Errorf("step %d: %v takes: %t, want %t", i, step.of, got, step.want)
		}
	}
	for _, of := range []netip.Addr{a, a, b} {
		q.give(of)
	}
	if q.total != 0 || len(q.of) != 0 || !q.take(c) {
		t.Errorf("after all was given back: %d, %v", q.total, q.of)
	}
}
