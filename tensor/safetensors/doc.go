// Package safetensors reads and writes the file format in which trained weights are published: a length of 8 bytes, a JSON
// header that names each tensor with its datatype, shape and place, then the tensors' bytes, little-endian and row by row.
//
// [Read] checks the whole header before anything is believed, so that a file from elsewhere can neither make the reader
// allocate more than a bounded multiple of its header nor point it anywhere but into its data: tensors lie one behind the other from
// the data's first byte to its last, each with as many bytes as its datatype and shape need, and no name comes twice. What two
// readers could understand differently is refused: keys that come twice, unknown fields, text that is no Unicode, numbers that are
// no plain integers. [File.Tensor] reads one tensor.
//
// [Inspect] says what a model of one or many files takes before anything loads it. [Write] writes a
// file without having it in memory.
//
// # Which files a model has
//
// A path that ends in .safetensors is the one file, one that ends in .safetensors.index.json is an index. In a folder it is the index,
// if there is one; else each *.safetensors. Other files, and names that begin with a dot, are passed over. An index
// is a JSON object whose weight_map says of each tensor which file beside it has it; those files have these tensors and no others.
package safetensors
