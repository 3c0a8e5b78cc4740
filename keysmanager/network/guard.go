package network

import (
	"fmt"
	"net/netip"
	"os"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// guardTable is the name of the table of [Guard].
const guardTable = "stagecoach"

// cloudsOverIPv6 are the addresses at which clouds serve the machine's credentials over IPv6.
var cloudsOverIPv6 = []netip.Addr{
	netip.MustParseAddr("fd00:ec2::254"), // AWS
	netip.MustParseAddr("fd20:ce::254"),  // Google
}

// Guard adds a firewall to a replica's namespace whose links others have made. Whichever way these
// links lead, the namespace sends nothing to the networks that no replica reaches: link-local
// addresses, those of clouds' metadata services, multicast. The addresses in except stay open: the
// name servers that the links' makers have given. Processes without rights over the namespace
// cannot change the firewall.
func Guard(ns *os.File, except []netip.Addr) error {
	conn, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())))
	if err != nil {
		return fmt.Errorf("firewall of a replica's namespace: %w", err)
	}
	f := &firewall{conn: conn, table: conn.AddTable(&nftables.Table{Name: guardTable, Family: nftables.TableFamilyINet})}
	refuse := conn.AddChain(&nftables.Chain{Name: "refuse", Table: f.table})
	f.refuseAll(refuse)
	output := f.hook("output", nftables.ChainTypeFilter, nftables.ChainHookOutput, nftables.ChainPriorityFilter)
	f.rule(output, to("lo\x00"), accept)
	f.rule(output, to(GatewayLink+"\x00"), accept) // the machine's firewall filters it
	for _, a := range except {
		if a.Is4() {
			f.rule(output, family(expr.CmpOpEq), destination(netip.PrefixFrom(a, 32)), accept)
		}
	}
	for _, p := range nowhere {
		f.rule(output, family(expr.CmpOpEq), destination(p), jump(refuse))
	}
	for _, a := range cloudsOverIPv6 {
		f.rule(output, family(expr.CmpOpNeq),
			&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: 24, Len: 16},
			&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: a.AsSlice()}, jump(refuse))
	}
	if err := conn.Flush(); err != nil {
		return fmt.Errorf("firewall of a replica's namespace: %w", err)
	}
	return nil
}
