// Package onnx makes and cuts ONNX models.
//
// [Synthetic] writes a transformer encoder of a wanted size with generated weights, for benchmarks that need parameters of
// 100 MB or 5 GB and no particular meaning. [CutPoints] and [Cut] split a model into stages at tensors through which all
// data flows, exactly: running the stages one after the other computes what the whole computes.
//
// This package belongs to the build of a pipeline, not to its run: the runtime is package stage/zygote.
package onnx
