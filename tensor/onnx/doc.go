// Package onnx makes and cuts ONNX models.
//
// [Synthetic] writes a transformer encoder of the requested size with generated weights. It is for
// benchmarks that need, for example, 100 MB or 5 GB of parameters, but no meaningful results.
//
// [Bert.Sentences] makes a sentence encoder from trained parameters.
//
// [CutPoints], [Balanced] and [Cut] split a model into stages, at tensors through which all data
// flows. Run one after the other, the stages do the operations of the whole model. A runtime that
// fuses operations does not fuse across a cut, so the last bits may differ there.
//
// A pipeline's build uses this package. Its runtime is package stage/zygote.
package onnx
