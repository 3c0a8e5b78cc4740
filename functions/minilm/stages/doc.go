// Package stages makes the first and the last stage of the minilm pipeline; each has a program of its own, in embed and pool,
// that hands these hooks to stage.Main. The six layers between them need no code: they are functions/onnx with a model each.
//
//	minilm-embed      texts in                                        an item a batch of texts out: FP32 hidden.0
//	                                                                  [batch, tokens, 384] and INT64 attention_mask
//	                                                                  [batch, tokens]
//	minilm-layer-1…6  one such item in (stagecoach.dev/each)          the same with hidden.1 … hidden.6
//	minilm-pool       those items in                                  application/json: an embedding is 384 numbers
//
// A JSON array of strings is answered with an array of embeddings, a body that is no JSON with one embedding.
//
// The texts of a request are padded to batches of at most [BatchTokens] tokens, in the request's order. A layer is several
// times as fast for a batch of short texts as for one after the other, since its 7 MB of parameters pass through the caches
// once a batch; and the bound keeps calls of like length, which several replicas can share.
package stages
