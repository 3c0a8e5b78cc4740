// Package queue is Stagecoach's use of NATS, and the only importer of nats.go: an embedded server, the [Bus] that carries
// tasks and replies, the [Link] to nodes, the [KV] that holds specs, and the [Journal] that keeps accepted async requests on disk.
//
// What rides where: tasks and replies are core NATS messages, at most once, because a coordinator that waits for them
// retries inside the deadline; async requests are file-backed JetStream messages, because nobody waits.
// Tensors above tensor.InlineLimit, streams, logs and secrets never ride on NATS.
//
// A journal's records are worked on at least once. A record runs a second time when the process dies after its work and
// before the disk knows of that, so that what must not happen twice has to check the record's ID by itself. What a client
// sends twice, with the same X-Call-Id too, are two records.
//
// Names become subject tokens through [Token]: dots and everything else that NATS gives a meaning are escaped.
package queue
