// Package safetensors reads and writes the file format in which trained weights are published. A
// file has a length of 8 bytes, a JSON header with the datatype, shape and place of each tensor,
// and the bytes of the tensors, little-endian and row by row.
//
// [Read] checks the whole header before it uses any of it. So a foreign file cannot make the reader
// allocate more than a bounded multiple of its header, or read outside the data:
//
//   - Tensors follow each other without gaps from the first byte of the data to the last.
//   - Each has as many bytes as its datatype and shape need.
//   - No name occurs twice.
//
// Read refuses what two readers could understand differently: keys that occur twice, unknown
// fields, text that is not Unicode, and numbers that are not plain integers. [File.Tensor] reads
// one tensor.
//
// [Inspect] returns the memory that a model of one or many files needs, before it is loaded.
// [Write] writes a file without holding it in memory.
//
// # Which files a model has
//
// A path that ends in .safetensors is the only file. A path that ends in .safetensors.index.json is
// an index. In a folder, the model is the index if there is one, and otherwise each *.safetensors.
// Other files, and names that begin with a dot, are ignored.
//
// An index is a JSON object. Its weight_map has, for each tensor, the name of the file that has the
// tensor. The files are in the index's folder, and have no other tensors.
package safetensors
