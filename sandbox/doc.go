// Package sandbox is how a stage's process is started and what it may touch. A process is a child of this one ([Spawner])
// with a small environment, a session of its own, no descriptors but those it is given, and an end that is tied to ours.
//
// A stage's image is a folder ([Images]) and its process is isolated by nothing else: it can do what the user can do who
// started Stagecoach. A process of any other image gets that image as its root ([Command].Chroot), with namespaces of its
// own for mounts, processes and shared memory; the rights to make those are root's.
package sandbox
