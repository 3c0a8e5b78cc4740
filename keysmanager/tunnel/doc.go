// Package tunnel connects the processes of a cluster: control planes and nodes. Two processes have
// one TLS connection between them, which both may use to open any number of streams. Both sides are
// authenticated with certificates of package identity.
//
// A stream begins with one line of JSON, a [Request] with further fields. The handler of its Want
// answers with [Accept] or [Refuse], which send one line. After that, the stream is a connection
// for bytes in both directions. A stream that nobody reads holds back its own sender and no other
// stream.
//
// docs/node-protocol.md describes the protocol for other implementations.
package tunnel
