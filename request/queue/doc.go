// Package queue contains all uses of NATS, and is the only package that imports nats.go. It has an
// embedded server, the [Bus] that carries tasks and replies, the [Link] to nodes, the [KV] that
// stores specs, and the [Journal] that keeps accepted async requests on disk.
//
// Tasks and replies are core NATS messages, delivered at most once: a coordinator waits for them
// and retries within the deadline. Async requests are JetStream messages in files, because nobody
// waits for them. Tensors above tensor.InlineLimit, streams, logs and secrets never go over NATS.
//
// A journal's records run at least once. A record runs twice if the process ends after the work and
// before that is recorded on disk. Work that must not happen twice has to check the record's ID. If
// a client sends a request twice, even with the same X-Call-Id, there are two records.
//
// Names become subject tokens through [Token], which escapes dots and all other bytes that mean
// something to NATS.
package queue
