// Package wordpiece turns text into the token ids of an uncased BERT model, as the tokeniser that the model was trained with
// does: control characters go, accents go, letters become small, punctuation and Chinese characters stand alone, and each
// word is covered with the longest pieces of the vocabulary (Wu et al. 2016), or else is unknown.
//
// What the special tokens are called in the vocabulary ("[SEP]" and so on) is read as that token when it occurs in a text,
// exactly so spelled. That is the reference's behaviour, and the embeddings follow the reference.
package wordpiece
