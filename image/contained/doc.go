// Package contained keeps a node's images in containerd. It does there what image.Store does in a
// folder: pull, unpack, hold, collect.
//
// An image's parts are in containerd's content store, and its layers are snapshots. A lease per
// image keeps containerd's garbage collection from removing them. The root from which an image runs
// is a read-only view of its layers, mounted below the node's state:
//
//	HEX/image.json    how the image sha256:HEX runs; written once it is complete
//	HEX/fs            the mounted view
//
// The time of change of the folder HEX is the time of the image's last use.
//
// Leases, and views among containerd's snapshots, have the label of the folder that they belong to.
// So several nodes may share a namespace of containerd, and a node finds what an earlier process
// has left.
package contained
