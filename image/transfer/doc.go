// Package transfer moves images between the stores of a cluster's processes. A [Server] serves a
// store with the read-only part of the OCI distribution API. A [Fetcher] gets an image into a
// store from the first of several sources that has it: neighbours, the control plane, a registry.
// Both work over any connection; whoever opens the connections decides who may connect.
package transfer
