// Package tensor holds what flows between stages: activations, made of named tensors or plain bytes, and the store that
// carries the large ones by reference.
//
// An [Activation] is an ordered list of items. An [Item] is either a set of named tensors, as the Open Inference
// Protocol v2 defines them (name, datatype, shape, raw little-endian bytes), or one byte string with a content type.
// [AppendActivation] and [DecodeActivation] are the one binary form, used over NATS and over a replica's socket alike.
//
// Items larger than [InlineLimit] do not travel in messages: they are put into a [Store] and leave a [Ref] behind.
package tensor
