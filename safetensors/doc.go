// Package safetensors reads the file format in which trained weights are published: a length of 8 bytes, a JSON header that
// names each tensor with its datatype, shape and place, then the tensors' bytes, little-endian and row by row.
//
// [Read] checks the whole header before anything is believed, so that a file from elsewhere can neither make the reader
// allocate more than the file has nor point it anywhere but into its data. [File.Tensor] reads one tensor.
//
// It belongs to the build of a pipeline, not to its run.
package safetensors
