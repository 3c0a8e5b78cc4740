// Package ocr reads text from pictures of pages, with the detector and the recogniser of PP-OCRv4.
//
// It makes the inputs of the two networks and interprets their outputs. A [Model] runs a network.
// Apart from that, the package does no I/O.
//
//	page, err := ocr.Decode(png)
//	boxes, err := ocr.Detect(detector, page)                     // boxes with text, in reading order
//	line, err := ocr.Recognise(recogniser, keys, ocr.Crop(page, boxes[0].Rect)) // for each box
//	text := ocr.Plain(ocr.Assemble(lines))                       // boxes on one line joined
//
// The detector is a differentiable-binarisation network (Liao et al., Real-time Scene Text
// Detection with Differentiable Binarization, AAAI 2020). The recogniser ends in connectionist
// temporal classification (Graves et al., ICML 2006).
package ocr

import "github.com/stagecoach-serving/stagecoach/tensor"

// Model runs a network with one input, "x", and one output. The zygote's sessions are models.
type Model interface {
	Run(inputs []tensor.Tensor, outputs ...string) ([]tensor.Tensor, error)
}
