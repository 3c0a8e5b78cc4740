// Package join runs a model once for several sets of inputs, by joining them along the batch axis,
// which is the first axis of every input and output.
//
// Sets are joined only where the model allows it:
//   - All inputs and outputs of the model have a first axis of any length.
//   - The joined sets have the same names, datatypes and other axes. If the model has an input
//     attention_mask, sets may differ in the length of the second axis, as the mask has it. The
//     shorter sets are padded with zeros, also in the mask, and their outputs are cut again.
//   - The first joined run of each kind (with and without padding) is compared with runs of the
//     single sets. If the results differ by more than rounding, or the joined run fails, the model
//     is never joined in that way again. A model whose first axis is no batch axis, or whose
//     quantization depends on all rows, is found this way.
//
// A set that cannot be joined runs alone. If a joined run fails, each half of its sets runs on its
// own, and so on, so that one bad set never fails another one.
package join
