// Package torch carries the handler of the transformer, so that a benchmark makes a stage of it wherever it runs.
package torch

import _ "embed"

// TransformerHandler is the handler.py of functions/torch/transformer: its stages compute with parameters of package synthetic.
//
//go:embed transformer/handler.py
var TransformerHandler []byte
