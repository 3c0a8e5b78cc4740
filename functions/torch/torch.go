// Package torch contains the handler of the transformer, so that a benchmark can make a stage of it
// on any machine.
package torch

import _ "embed"

// TransformerHandler is the handler.py of functions/torch/transformer. Its stages compute with
// parameters of package synthetic.
//
//go:embed transformer/handler.py
var TransformerHandler []byte
