// Package pods is a sandbox.Runtime whose processes are in pods of Kubernetes. A pod is made for
// each Command: for a zygote, whose forks live inside it, for a stage that has no zygote, and for a
// program of a watchdog. So a function has a pod per node, with all of its replicas there, or a pod
// per replica. A watchdog that starts a program per request has a pod for all of them: see
// [sandbox.Room].
//
// A program of a watchdog is in the network of its pod, and the watchdog in that of its daemon's.
// The watchdog makes its sockets in the pod's network: see [sandbox.Apart].
//
// A pod's descriptors, arguments and environment do not pass through Kubernetes: see package entry.
// The Runtime finds the socket of a pod's first program in an empty volume of the pod, which the
// kubelet makes in a folder of the machine. The pod needs no rights for that, and no folder of the
// machine. Files that the program has to see, such as those of its image, are mounted into the
// running pod: see [sandbox.Command.Show].
//
// A pod ends with the process of its Runtime.
package pods
