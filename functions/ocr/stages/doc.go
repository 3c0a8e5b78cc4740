// Package stages has the three stages of the OCR pipeline, which use package ocr. The programs
// detect, recognise and text pass these hooks to stage.Main.
//
//	ocr-detect     in:  one item, a PNG or JPEG
//	               out: one item per box, in reading order: crop UINT8 [height, width, 3] and
//	                    box INT64 [4]
//	ocr-recognise  in:  one such item (stagecoach.dev/each)
//	               out: {"text", "confidence", "box"}
//	ocr-text       in:  those items, in any order
//	               out: the page's text
//
// A box is [left, top, right, bottom] in the page's pixels. A crop is at most 48 pixels high, so
// most crops are small enough to travel in messages. For a page without text, ocr-recognise is not
// called, and the answer is empty. A client that accepts application/json gets {"text", "lines":
// [{"text", "confidence", "box"}]} instead of plain text.
package stages
