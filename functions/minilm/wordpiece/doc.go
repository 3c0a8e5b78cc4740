// Package wordpiece turns text into the token ids of an uncased BERT model, as the tokeniser of its
// training does:
//
//   - Control characters and accents are removed, and letters become lower case.
//   - Punctuation and Chinese characters are separate words.
//   - Each word is covered with the longest pieces of the vocabulary (Wu et al. 2016). A word that
//     cannot be covered is unknown.
//
// A name of a special token in the text, spelled exactly as in the vocabulary ("[SEP]" and so on),
// becomes that token, because the reference does this, too.
package wordpiece
