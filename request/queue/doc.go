// Package queue contains all uses of NATS, and is the only package that imports nats.go. It has an
// embedded server, the [Bus] that carries tasks and replies, the [Link] to nodes, the [KV] that
// stores specs, and the [Journal] that keeps accepted async requests on disk.
//
// Tasks and replies are core NATS messages, delivered at most once. A coordinator waits for each
// reply and retries within the deadline. Async requests are JetStream messages in files, because no
// client waits that could retry. Tensors above tensor.InlineLimit, streams, logs and secrets never
// go over NATS.
//
// A journal's records run at least once. A record runs twice if the process ends after the work,
// but before the work's end is on disk. Work that must not happen twice has to check the record's
// ID. If a client sends a request twice, there are two records, even if both requests have the same
// X-Call-Id.
//
// Names become subject tokens through [Token], which escapes dots and all other bytes that mean
// something to NATS.
package queue
