// Package cni connects replicas to networks that an operator's plugins make, by the conventions of
// the Container Network Interface. A replica's namespace comes from package network, with a link to
// this machine's gateway. The plugins add the other links, addresses and routes, and name servers.
//
//	n, err := cni.Open(network.Config{…}, cni.Config{Conf: "/etc/cni/net.d", BinDirs: dirs})
//	defer n.Close()
//	ns, resolv, err := n.Create() // ADD; a process enters ns, and the caller closes it
//	n.Ended()                     // a process has ended: DEL, if its namespace has no other one
//
// Two things record what plugins have made, so that a later process can give it back:
//
//	/var/lib/cni/results   libcni's cache: the configuration and result of each ADD
//	RUN/networks/cni/ID    written before the ADD: the configuration, and the namespace
//
// IDs begin with a hash of the owner's name. While the owner runs, it locks the file
// RUN/networks/cni/HASH.lock. Each Open gives back what belongs to an owner without a lock and has
// no process any more.
//
// It is the only package that imports libcni.
package cni
