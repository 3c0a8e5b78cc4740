// Package tensor holds the data that flows between stages: activations of named tensors or plain
// bytes, and the store that carries large ones by reference.
//
// An [Activation] is an ordered list of items. An [Item] is either a set of named tensors, as in
// the Open Inference Protocol v2 (name, datatype, shape, raw little-endian bytes), or a byte string
// with a content type. [AppendActivation] and [DecodeActivation] define the binary form, which is
// the same over NATS and on a replica's socket.
//
// Items larger than [InlineLimit] do not travel in messages. They are put into a [Store] and
// replaced by a [Ref].
package tensor
