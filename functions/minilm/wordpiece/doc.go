// Package wordpiece turns text into the token ids of an uncased BERT model, as the tokeniser of its
// training does:
//
//   - Control characters and accents are removed, and letters become lower case.
//   - Punctuation and Chinese characters are separate words.
//   - Each word is covered with the longest pieces of the vocabulary (Wu et al. 2016). A word that
//     cannot be covered is unknown.
//
// If a text contains the name of a special token, exactly as the vocabulary spells it ("[SEP]" and
// so on), it becomes that token. The reference does the same, and the embeddings follow the
// reference.
package wordpiece
