// Package queue is Stagecoach's use of NATS, and the only importer of nats.go: an embedded server, the [Bus] that carries
// tasks and replies, the [KV] that holds specs, and the [Journal] that keeps accepted async requests on disk.
//
// What rides where: tasks and replies are core NATS messages, at most once, because a coordinator that waits for them
// retries inside the deadline; async requests are file-backed JetStream messages, at least once, because nobody waits.
// Tensors above tensor.InlineLimit, streams, logs and secrets never ride on NATS.
//
// Names become subject tokens through [Token]: dots and everything else that NATS gives a meaning are escaped.
package queue
