// Package stages makes the three stages of the OCR pipeline out of package ocr; each has a program of its own, in detect,
// recognise and text, that hands these hooks to stage.Main.
//
//	ocr-detect     one item, a PNG or JPEG, in                          an item a box out, in reading order:
//	                                                                    crop UINT8 [height, width, 3] and box INT64 [4]
//	ocr-recognise  one such item in (stagecoach.dev/each)               {"text", "confidence", "box"} out
//	ocr-text       those items in, in any order                         the page's text out
//
// Boxes are [left, top, right, bottom] in the page's pixels. A crop is at most 48 pixels high, so that few outgrow what
// travels in messages. A page without text is no boxes, no calls and empty text. A client that accepts application/json
// gets {"text", "lines": [{"text", "confidence", "box"}]} instead of plain text.
package stages
