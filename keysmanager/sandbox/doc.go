// Package sandbox starts the processes of stages and limits what they can reach. A process is a
// child of this one ([Spawner]). It has a small environment, its own session, limits, only the
// descriptors that it was given, and no way to gain rights. It ends when its parent ends.
//
// A stage's image is a folder ([Images]). The process of a stage can run as a user of its own
// ([Command].As), which [Accounts] assigns. Such a process has no rights. It reads what every user
// can read and what its Command names, and it changes none of that except what its Command allows.
// Without an account, the process can do what the user who started Stagecoach can do.
//
// A process of any other image has the image as its root ([Command].Chroot), and its own namespaces
// for mounts, processes and shared memory. Accounts and roots both need root's rights.
package sandbox
