// Package onnx makes and cuts ONNX models.
//
// [Synthetic] writes a transformer encoder of a wanted size with generated weights, for benchmarks that need parameters of
// 100 MB or 5 GB and no particular meaning.
//
// [Bert.Sentences] writes a sentence encoder whose trained parameters come from somewhere else.
//
// [CutPoints], [Balanced] and [Cut] split a model into stages at tensors through which all data flows, exactly: run one
// after the other, the stages do the operations of the whole. A runtime that fuses operations does not fuse across a cut;
// where it would have, the last bits may round differently.
//
// This package belongs to the build of a pipeline, not to its run: the runtime is package stage/zygote.
package onnx
