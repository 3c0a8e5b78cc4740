package netnstest

import (
	"encoding/binary"
	"fmt"
	"net"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// Cut drops all packets from one machine to another, without a word to either. It drops none of the
// other direction.
type Cut struct {
	From, To *Machine
	Port     uint16 // only packets to and from this TCP port, of either machine; 0: all packets
}

// Between returns the cuts of both directions between each of some machines and each of the others.
func Between(some, others []*Machine) (all []Cut) {
	for _, a := range some {
		for _, b := range others {
			if a != b {
				all = append(all, Cut{From: a, To: b}, Cut{From: b, To: a})
			}
		}
	}
	return all
}

// Others returns the machines that are not in some.
func (n *Net) Others(some ...*Machine) (out []*Machine) {
	in := map[*Machine]bool{}
	for _, m := range some {
		in[m] = true
	}
	for _, m := range n.all {
		if !in[m] {
			out = append(out, m)
		}
	}
	return out
}

// Cut makes cuts, beside those that there are.
func (n *Net) Cut(cuts ...Cut) {
	n.t.Helper()
	for _, c := range cuts {
		n.cuts[c] = true
	}
	n.apply()
}

// Heal ends all cuts.
func (n *Net) Heal() {
	n.t.Helper()
	clear(n.cuts)
	n.apply()
}

func (n *Net) apply() {
	n.t.Helper()
	for _, m := range n.all {
		var from []Cut
		for c := range n.cuts {
			if c.To == m {
				from = append(from, c)
			}
		}
		n.check(m.drop(from))
	}
}

// filter makes the chain of the machine that drops packets.
func (m *Machine) filter() error {
	c, err := nftables.New(nftables.WithNetNSFd(int(m.ns.Fd())))
	if err != nil {
		return err
	}
	table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "netnstest"})
	m.cut = c.AddChain(&nftables.Chain{
		Name: "cuts", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw,
	})
	m.wall = c.AddChain(&nftables.Chain{
		Name: "wall", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw,
	})
	return c.Flush()
}

// Allow sets up a firewall on the machine. It drops packets that begin a TCP connection from
// another machine, unless they are for one of the ports.
func (m *Machine) Allow(ports ...uint16) {
	m.t.Helper()
	c, err := nftables.New(nftables.WithNetNSFd(int(m.ns.Fd())))
	if err != nil {
		m.t.Fatal(err)
	}
	is := []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte("eth0\x00")},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		// The flags SYN and ACK.
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 1, Mask: []byte{0x12}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{0x02}},
	}
	for _, port := range ports {
		is = append(is, &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: binary.BigEndian.AppendUint16(nil, port)})
	}
	c.FlushChain(m.wall)
	c.AddRule(&nftables.Rule{Table: m.wall.Table, Chain: m.wall, Exprs: append(is, &expr.Verdict{Kind: expr.VerdictDrop})})
	if err := c.Flush(); err != nil {
		m.t.Fatalf("firewall of %s: %v", m.IP, err)
	}
}

// drop makes the machine drop the packets of these cuts, and no others.
func (m *Machine) drop(cuts []Cut) error {
	c, err := nftables.New(nftables.WithNetNSFd(int(m.ns.Fd())))
	if err != nil {
		return err
	}
	c.FlushChain(m.cut)
	add := func(is ...[]expr.Any) {
		rule := &nftables.Rule{Table: m.cut.Table, Chain: m.cut}
		for _, e := range is {
			rule.Exprs = append(rule.Exprs, e...)
		}
		rule.Exprs = append(rule.Exprs, &expr.Verdict{Kind: expr.VerdictDrop})
		c.AddRule(rule)
	}
	for _, cut := range cuts {
		source := payload(expr.PayloadBaseNetworkHeader, 12, net.ParseIP(cut.From.IP).To4())
		if cut.Port == 0 {
			add(source)
			continue
		}
		port := binary.BigEndian.AppendUint16(nil, cut.Port)
		tcp := []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}}}
		for _, at := range []uint32{0, 2} { // source port, destination port
			add(source, tcp, payload(expr.PayloadBaseTransportHeader, at, port))
		}
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("cuts to %s: %w", m.IP, err)
	}
	return nil
}

// payload matches packets with these bytes at a place of a header.
func payload(base expr.PayloadBase, at uint32, want []byte) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: base, Offset: at, Len: uint32(len(want))},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: want},
	}
}
