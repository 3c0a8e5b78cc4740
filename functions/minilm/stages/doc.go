// Package stages makes the first and the last stage of the minilm pipeline; each has a program of its own, in embed and pool,
// that hands these hooks to stage.Main. The six layers between them need no code: they are functions/onnx with a model each.
//
//	minilm-embed      texts in                                        an item a batch of texts out: FP32 hidden.0
//	                                                                  [batch, tokens, 384] and INT64 attention_mask
//	                                                                  [batch, tokens]
//	minilm-layer-1…6  one such item in (stagecoach.dev/each)          the same with hidden.1 … hidden.6
//	minilm-pool       those items in                                  application/json: an embedding is 384 numbers
//
// The answer is an array of embeddings, one a text, whether one text came as a plain body or several as a JSON array.
//
// Texts that follow each other in a request are padded to a batch, which is one call of a layer, of at most [BatchTokens]
// tokens with at most a quarter of padding. On a processor a token costs the same, some 50 µs a layer, whether its text is
// computed alone or with others (BenchmarkLayer), so that padding is a loss and larger batches are no gain: batches are for
// short texts, which cost as little as the way to the replica does. Small batches are also shared well among replicas.
package stages
