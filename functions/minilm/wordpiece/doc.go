// Package wordpiece turns text into the token ids of an uncased BERT model, as the tokeniser of its
// training does:
//
//   - Control characters and accents are removed, and letters become lower case.
//   - Punctuation and Chinese characters are separate words.
//   - Each word is covered with the longest pieces of the vocabulary (Wu et al. 2016). A word that
//     cannot be covered is unknown.
//
// If the text contains the name of a special token, such as "[SEP]", the name becomes that token,
// as in the reference. It must be spelled exactly as in the vocabulary.
package wordpiece
