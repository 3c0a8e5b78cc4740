package network

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
)

// tablePrefix begins the names of the tables of all Stagecoach processes on the machine.
const tablePrefix = "stagecoach_"

// firewall is the nftables table of a slice.
type firewall struct {
	conn     *nftables.Conn
	table    *nftables.Table
	admitted *nftables.Set // address, protocol and port on the machine that replicas may reach
}

func openFirewall(home *os.File, slice netip.Prefix) (*firewall, error) {
	conn, err := nftables.New(nftables.WithNetNSFd(int(home.Fd())))
	if err != nil {
		return nil, err
	}
	table := &nftables.Table{Name: tablePrefix + folderName(slice), Family: nftables.TableFamilyINet}
	return &firewall{conn: conn, table: table, admitted: &nftables.Set{
		Table: table, Name: "admitted", Concatenation: true,
		KeyType: nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetProto, nftables.TypeInetService),
	}}, nil
}

// element returns an entry of the set of admitted addresses. Each part is padded to four bytes.
func element(proto byte, to netip.AddrPort) nftables.SetElement {
	b := to.Addr().As4()
	return nftables.SetElement{Key: []byte{b[0], b[1], b[2], b[3], proto, 0, 0, 0, byte(to.Port() >> 8), byte(to.Port()), 0, 0}}
}

// install creates the table, or replaces its rules atomically. Entries admitted by an earlier owner
// stay. If gatewayOnly is set, nothing that comes from replicas' links is forwarded.
func (f *firewall) install(slice, cidr netip.Prefix, gateway netip.Addr, gatewayOnly bool) error {
	f.conn.AddTable(f.table)
	if err := f.conn.AddSet(f.admitted, nil); err != nil {
		return err
	}
	f.conn.FlushTable(f.table) // of its rules
	ours, anyones := linkPrefix(slice), prefix

	refuse := f.conn.AddChain(&nftables.Chain{Name: "refuse", Table: f.table})
	f.refuseAll(refuse)

	// Replicas may send only IPv4 with their own address, and only replicas and the machine may
	// reach the gateway's address.
	raw := f.hook("prerouting", nftables.ChainTypeFilter, nftables.ChainHookPrerouting, nftables.ChainPriorityRaw)
	f.rule(raw, from(ours), family(expr.CmpOpNeq), drop)
	f.rule(raw, from(ours), &expr.Fib{Register: 1, ResultOIF: true, FlagSADDR: true, FlagIIF: true}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: make([]byte, 4)}, drop)
	f.rule(raw, notFrom(anyones), notFrom("lo\x00"), family(expr.CmpOpEq), destination(netip.PrefixFrom(gateway, 32)), drop)

	input := f.hook("input", nftables.ChainTypeFilter, nftables.ChainHookInput, nftables.ChainPriorityFilter)
	f.rule(input, notFrom(ours), accept)
	f.rule(input, established, accept)
	f.rule(input, f.isAdmitted(), accept)
	f.rule(input, jump(refuse))

	output := f.hook("output", nftables.ChainTypeFilter, nftables.ChainHookOutput, nftables.ChainPriorityFilter)
	f.rule(output, notTo(ours), accept)
	f.rule(output, established, accept)
	f.rule(output, jump(refuse))

	forward := f.hook("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, nftables.ChainPriorityFilter)
	if gatewayOnly {
		f.rule(forward, from(ours), jump(refuse))
	}
	f.rule(forward, from(ours), to(anyones), jump(refuse))
	for _, p := range append([]netip.Prefix{cidr}, nowhere...) {
		f.rule(forward, from(ours), destination(p), jump(refuse))
	}
	f.rule(forward, notTo(ours), accept)
	f.rule(forward, established, accept)
	f.rule(forward, jump(refuse))

	nat := f.hook("postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource)
	f.rule(nat, family(expr.CmpOpEq), source(slice), notTo(anyones), notTo("lo\x00"), &expr.Masq{})
	return f.conn.Flush()
}

// refuseAll adds the rules of a chain that answers each packet with a rejection.
func (f *firewall) refuseAll(c *nftables.Chain) {
	f.rule(c, protocol(unix.IPPROTO_TCP), &expr.Reject{Type: unix.NFT_REJECT_TCP_RST})
	f.rule(c, &expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: unix.NFT_REJECT_ICMPX_ADMIN_PROHIBITED})
}

// admit adds entries to the set of admitted addresses. If replaceAll is set, it removes all earlier
// ones.
func (f *firewall) admit(replaceAll bool, entries ...nftables.SetElement) error {
	if replaceAll {
		f.conn.FlushSet(f.admitted)
	}
	if err := f.conn.SetAddElements(f.admitted, entries); err != nil {
		return err
	}
	return f.conn.Flush()
}

// remove deletes the table.
func (f *firewall) remove() error {
	f.conn.AddTable(f.table) // so that deleting one that is gone is no error
	f.conn.DelTable(f.table)
	return f.conn.Flush()
}

func (f *firewall) hook(name string, kind nftables.ChainType, at *nftables.ChainHook, priority *nftables.ChainPriority) *nftables.Chain {
	policy := nftables.ChainPolicyAccept
	return f.conn.AddChain(&nftables.Chain{Name: name, Table: f.table, Type: kind, Hooknum: at, Priority: priority, Policy: &policy})
}

// rule adds a rule of parts, each an expression or a list of expressions.
func (f *firewall) rule(c *nftables.Chain, parts ...any) {
	var all []expr.Any
	for _, p := range parts {
		switch p := p.(type) {
		case []expr.Any:
			all = append(all, p...)
		case expr.Any:
			all = append(all, p)
		default:
			panic(fmt.Sprintf("network: a rule's part is a %T", p))
		}
	}
	f.conn.AddRule(&nftables.Rule{Table: f.table, Chain: c, Exprs: all})
}

var (
	accept = &expr.Verdict{Kind: expr.VerdictAccept}
	drop   = &expr.Verdict{Kind: expr.VerdictDrop}
	// established matches packets of exchanges that were accepted before.
	established = []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(expr.CtStateBitESTABLISHED | expr.CtStateBitRELATED), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
)

func jump(c *nftables.Chain) expr.Any { return &expr.Verdict{Kind: expr.VerdictJump, Chain: c.Name} }

// link matches links whose names begin, or do not begin, with start. A name ends with a zero byte.
func link(key expr.MetaKey, op expr.CmpOp, start string) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, &expr.Cmp{Op: op, Register: 1, Data: []byte(start)}}
}

func from(start string) []expr.Any    { return link(expr.MetaKeyIIFNAME, expr.CmpOpEq, start) }
func notFrom(start string) []expr.Any { return link(expr.MetaKeyIIFNAME, expr.CmpOpNeq, start) }
func to(start string) []expr.Any      { return link(expr.MetaKeyOIFNAME, expr.CmpOpEq, start) }
func notTo(start string) []expr.Any   { return link(expr.MetaKeyOIFNAME, expr.CmpOpNeq, start) }

// family matches IPv4, or everything else.
func family(op expr.CmpOp) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, &expr.Cmp{Op: op, Register: 1, Data: []byte{unix.NFPROTO_IPV4}}}
}

func protocol(proto byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{proto}}}
}

func source(p netip.Prefix) []expr.Any      { return network(12, p) }
func destination(p netip.Prefix) []expr.Any { return network(16, p) }

// network matches the IPv4 address at an offset of the header.
func network(at uint32, p netip.Prefix) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: at, Len: 4},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: net.CIDRMask(p.Bits(), 32), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: p.Masked().Addr().AsSlice()},
	}
}

// isAdmitted matches packets to an admitted address, protocol and port. The parts of the key are in
// registers of four bytes.
func (f *firewall) isAdmitted() []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: unix.NFT_REG32_00, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: unix.NFT_REG32_01},
		&expr.Payload{DestRegister: unix.NFT_REG32_02, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Lookup{SourceRegister: unix.NFT_REG32_00, SetName: f.admitted.Name, SetID: f.admitted.ID},
	}
}

// obstacles returns the names of other chains that drop forwarded packets by default.
func (f *firewall) obstacles() ([]string, error) {
	chains, err := f.conn.ListChains()
	if err != nil {
		return nil, err
	}
	var out []string
	for _, c := range chains {
		if c.Hooknum == nil || *c.Hooknum != *nftables.ChainHookForward || strings.HasPrefix(c.Table.Name, tablePrefix) ||
			c.Table.Family != nftables.TableFamilyIPv4 && c.Table.Family != nftables.TableFamilyINet {
			continue
		}
		refuses := c.Policy != nil && *c.Policy == nftables.ChainPolicyDrop
		if !refuses {
			rules, err := f.conn.GetRules(c.Table, c)
			if err != nil {
				return nil, err
			}
			refuses = len(rules) > 0 && always(rules[len(rules)-1])
		}
		if refuses {
			out = append(out, c.Table.Name+" "+c.Name)
		}
	}
	return out, nil
}

// always reports whether a rule drops or rejects every packet.
func always(r *nftables.Rule) bool {
	for _, e := range r.Exprs {
		switch e := e.(type) {
		case *expr.Counter, *expr.Log:
		case *expr.Reject:
			return true
		case *expr.Verdict:
			return e.Kind == expr.VerdictDrop
		default:
			return false
		}
	}
	return false
}

// tables lists the slices that have a table.
func tables(conn *nftables.Conn) ([]netip.Prefix, error) {
	all, err := conn.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		return nil, err
	}
	var out []netip.Prefix
	for _, t := range all {
		if name, ok := strings.CutPrefix(t.Name, tablePrefix); ok {
			if p, ok := folderSlice(name); ok {
				out = append(out, p)
			}
		}
	}
	return out, nil
}
