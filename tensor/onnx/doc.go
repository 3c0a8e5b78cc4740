// Package onnx makes and cuts ONNX models.
//
// [Synthetic] writes a transformer encoder of a wanted size with generated weights, for benchmarks
// that need parameters of 100 MB or 5 GB without a meaning.
//
// [Bert.Sentences] makes a sentence encoder from trained parameters.
//
// [CutPoints], [Balanced] and [Cut] split a model into stages, at tensors through which all data
// flows. Run one after the other, the stages do the operations of the whole model. A runtime that
// fuses operations does not fuse across a cut, so the last bits may differ there.
//
// A pipeline's build uses this package. Its runtime is package stage/zygote.
package onnx
