// Package network gives each replica its own network namespace, with a loopback link and a link
// that leads out of the machine. A replica reaches neither other replicas nor the machine's own
// services, except those that [Networks.Admit] names.
//
//	cfg := network.Config{CIDR: cidr, Run: "/run/stagecoach", Owner: state, Log: log}
//	n, err := network.Open(cfg)
//	defer n.Close()
//	err = n.Admit(netip.AddrPortFrom(n.Gateway(), 8080))
//	ns, err := n.Create() // a process enters ns with setns(2); ns ends with its last process
//
// [Open] reserves a slice of the configured addresses on this machine. The slice has these parts:
//
//	address  GATEWAY/32 on the loopback link: the machine, as replicas see it; the slice's first
//	links    a veth pair per replica: outside "sgc" and the replica's address in hex, inside "eth0"
//	table    an nftables table "stagecoach_BASE_BITS" with the filters and address translation
//	folder   RUN/networks/BASE_BITS with the owner's name and the files that replicas see in /etc
//
// Nothing else records which addresses are in use: an address is free if its link does not exist.
// The kernel removes the link when the last process of its namespace has ended. All other parts
// outlive the process that made them. The next Open with the same Config.Owner adopts them. An Open
// with another owner removes them if the process that made them has ended and no link is left.
//
// The package works in the network namespace of the thread that calls [Open], whichever threads
// call the methods. It never changes the namespace of a thread that runs other code. If code must
// run in another namespace, it runs on a new thread, which then ends.
//
// It is the only package that imports the netlink and nftables libraries.
package network
