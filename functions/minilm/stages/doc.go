// Package stages has the stages of the minilm pipelines that are not layers. The programs tokenize,
// embed, encode and pool pass these hooks to stage.Main. The six layers between embed and pool need
// no code: each is functions/onnx with another model.
//
//	minilm-tokenize   in:  texts
//	                  out: one item per text: INT64 input_ids, attention_mask and token_type_ids
//	                       [1, tokens]
//	minilm-embed      in:  those items, or texts
//	                  out: one item per batch of texts: FP32 hidden.0 [batch, tokens, 384] and
//	                       INT64 attention_mask [batch, tokens]
//	minilm-layer-1…6  in:  one such item (stagecoach.dev/each)
//	                  out: an item with hidden.1 … hidden.6
//	minilm-pool       in:  those items
//	                  out: application/json; an embedding is 384 numbers
//
// minilm-encode is minilm-embed with the whole model, so its items are FP32 embedding [batch, 384],
// and minilm-pool takes these, too. In the stack of variants it gets one text per call.
//
// The answer is an array with one embedding per text. The request may be one text as a plain body,
// or several texts as a JSON array.
//
// Consecutive texts of a call form a batch, which is one call of a layer. They are padded to the
// longest of them. A batch has at most [BatchTokens] tokens, of which at most a quarter is padding.
// On a processor, a token costs about 50 µs per layer in a batch of any size (BenchmarkLayer), so
// padding costs time and large batches save little. Batches mostly save calls: sending a short text
// to a replica takes about as long as computing it. Small batches spread well over replicas.
package stages
