// Package onnxpb is generated from onnx.proto: the messages of an ONNX file. Package onnx reads and writes models with it.
package onnxpb
