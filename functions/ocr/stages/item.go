package stages

import (
	"encoding/binary"
	"fmt"
	"image"
	"slices"

	"github.com/stagecoach-serving/stagecoach/functions/ocr/ocr"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// The names of the tensors between detection and recognition.
const (
	cropName = "crop"
	boxName  = "box"
)

// boxItem returns the item of one box.
func boxItem(crop *image.RGBA, box image.Rectangle) tensor.Item {
	w, h := crop.Rect.Dx(), crop.Rect.Dy()
	pixels := make([]byte, 0, 3*w*h)
	for i := 0; i < len(crop.Pix); i += 4 {
		pixels = append(pixels, crop.Pix[i:i+3]...)
	}
	var corners []byte
	for _, v := range [4]int{box.Min.X, box.Min.Y, box.Max.X, box.Max.Y} {
		corners = binary.LittleEndian.AppendUint64(corners, uint64(v))
	}
	return tensor.Item{Tensors: []tensor.Tensor{
		{Name: cropName, Datatype: "UINT8", Shape: []int64{int64(h), int64(w), 3}, Data: pixels},
		{Name: boxName, Datatype: "INT64", Shape: []int64{4}, Data: corners},
	}}
}

// readBoxItem decodes an item of boxItem.
func readBoxItem(it tensor.Item) (*image.RGBA, image.Rectangle, error) {
	none := image.Rectangle{}
	crop, err := find(it, cropName, "UINT8", 3)
	if err != nil {
		return nil, none, err
	}
	box, err := find(it, boxName, "INT64", 1)
	if err != nil {
		return nil, none, err
	}
	h, w := crop.Shape[0], crop.Shape[1]
	if h < 1 || w < 1 || w > ocr.MaxPixels/h || crop.Shape[2] != 3 {
		return nil, none, fmt.Errorf("tensor %q: shape %v, want [height, width, 3] with at most %d pixels", cropName, crop.Shape, ocr.MaxPixels)
	}
	if box.Shape[0] != 4 {
		return nil, none, fmt.Errorf("tensor %q: shape %v, want [4]: left, top, right, bottom", boxName, box.Shape)
	}
	img := image.NewRGBA(image.Rect(0, 0, int(w), int(h)))
	for from, to := 0, 0; to < len(img.Pix); from, to = from+3, to+4 {
		copy(img.Pix[to:], crop.Data[from:from+3])
		img.Pix[to+3] = 255
	}
	at := func(i int) int { return int(int64(binary.LittleEndian.Uint64(box.Data[8*i:]))) }
	r := image.Rectangle{Min: image.Pt(at(0), at(1)), Max: image.Pt(at(2), at(3))}
	if r.Empty() {
		return nil, none, fmt.Errorf("tensor %q: %v is empty, want left < right and top < bottom", boxName, r)
	}
	return img, r, nil
}

// find returns the tensor of an item with this name, datatype and number of dimensions.
func find(it tensor.Item, name string, datatype tensor.Datatype, rank int) (tensor.Tensor, error) {
	at := slices.IndexFunc(it.Tensors, func(t tensor.Tensor) bool { return t.Name == name })
	if at < 0 {
		return tensor.Tensor{}, fmt.Errorf("an item with %d tensors and no %q, want %s %q with %d dimensions", len(it.Tensors), name, datatype, name, rank)
	}
	t := it.Tensors[at]
	if t.Datatype != datatype || len(t.Shape) != rank {
		return t, fmt.Errorf("tensor %q: %s %v, want %s with %d dimensions", name, t.Datatype, t.Shape, datatype, rank)
	}
	return t, t.Validate()
}
