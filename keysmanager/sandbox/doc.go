// Package sandbox is how a stage's process is started and what it may touch. A process is a child of this one ([Spawner])
// with a small environment, a session of its own, no descriptors but those it is given, limits, no way to gain rights, and an
// end that is tied to ours.
//
// A stage's image is a folder ([Images]). Its process can run as a user of its own ([Command].As), whom [Accounts] gives out: then
// it has no rights, reaches what everybody does and what its Command names, and changes nothing of that. Without one it can do
// what the user can do who started Stagecoach. A process of any other image gets that image as its root ([Command].Chroot), with
// namespaces of its own for mounts, processes and shared memory. Both need root's rights.
package sandbox
