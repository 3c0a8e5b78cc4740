// Package items keeps large outputs of replicas on their node, and carries them to other nodes and
// to the control plane, over streams of the tunnel. What travels with a task is a [tensor.Ref]: the
// node, a name, the size and a checksum.
//
// [Store] is a daemon's items. [Carrier] gets items for a daemon, and [Plane] for a control plane.
// The bytes of an item go from the node that keeps it to the process that needs it. If no
// connection comes about between two nodes, the control plane passes them on.
package items
