// Package cluster carries plans out on nodes that this process reaches directly, and observes what they have become.
//
// [Local] is the observer and the applier of package control. It knows specs from [Functions], load from [Lines], and has
// two hands: [Node] starts and stops processes, [Replicas] gives them work. Each replica has a goroutine of its own, which
// takes it through its life and is the only one to change its state:
//
//	ordered ─▶ starting ─Start, Attach─▶ ready ─not wanted─▶ draining ─Drain─▶ Stop ─▶ gone
//	              └──── failed ─▶ Stop     └── lost ─▶ Stop ─▶ gone
//
// Apply only orders and lets go; it waits for nothing, may be called with the same plan twice, and leaves alone what has
// changed since the plan's snapshot. Starts that fail are tried again later and later ([Backoff]); while none succeeds,
// waiting tasks are answered with the cause instead of being left to their deadlines.
package cluster
