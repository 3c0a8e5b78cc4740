// Package sandbox is how a stage's process is started and what it may touch. This is the process runtime: an image is a
// folder ([Images]), and a process is a child of this one ([Spawner]) with a small environment, a session of its own, no
// descriptors but those it is given, and an end that is tied to ours.
//
// It isolates nothing else: a function can do what the user can do who started Stagecoach.
package sandbox
