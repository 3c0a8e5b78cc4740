package ocr

import (
	"encoding/binary"
	"image"
	"math"

	"github.com/stagecoach-serving/stagecoach/tensor"
)

// planes returns img as a network's input [1, 3, height, width]: planes in the order blue, green,
// red, with values (v/255 − mean)/std. If img is narrower than width, the rest is 0.
func planes(img *image.RGBA, width int, mean, std [3]float32) tensor.Tensor {
	w, h := img.Bounds().Dx(), img.Bounds().Dy()
	data := make([]byte, 4*3*h*width)
	for c := range 3 {
		var bits [256]uint32
		for v := range bits {
			bits[v] = math.Float32bits((float32(v)/255 - mean[c]) / std[c])
		}
		for y := range h {
			src := img.Pix[y*img.Stride+2-c:]
			dst := data[4*(c*h+y)*width:]
			for x := range w {
				binary.LittleEndian.PutUint32(dst[4*x:], bits[src[4*x]])
			}
		}
	}
	return tensor.Tensor{Name: "x", Datatype: "FP32", Shape: []int64{1, 3, int64(h), int64(width)}, Data: data}
}

// floats decodes the data of an FP32 tensor.
func floats(data []byte) []float32 {
	out := make([]float32, len(data)/4)
	for i := range out {
		out[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return out
}
