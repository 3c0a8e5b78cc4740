package ocr

import (
	"bytes"
	"fmt"
	"image"
	"image/color"
	_ "image/jpeg" // a format of pages
	_ "image/png"  // another format of pages

	"golang.org/x/image/draw"
)

// Limits of a page. An A4 page at 400 dpi has 15.4 million pixels.
const (
	MaxPixels = 1 << 24
	MinSide   = 16 // a line of text needs more
)

// Decode decodes a PNG or a JPEG, whatever its content type is, onto white. It refuses pages beyond
// [MaxPixels] and below [MinSide] before it allocates memory for them.
func Decode(b []byte) (*image.RGBA, error) {
	if !bytes.HasPrefix(b, []byte("\x89PNG\r\n\x1a\n")) && !bytes.HasPrefix(b, []byte("\xff\xd8\xff")) {
		return nil, fmt.Errorf("page: %d bytes that start with %q, want a PNG or JPEG", len(b), b[:min(len(b), 8)])
	}
	c, format, err := image.DecodeConfig(bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("page: header of %d bytes: %w; want a whole PNG or JPEG", len(b), err)
	}
	if min(c.Width, c.Height) < MinSide || c.Width > MaxPixels/c.Height {
		return nil, fmt.Errorf("page: %s of %d×%d pixels, want sides of at least %d and at most %d pixels in all", format, c.Width, c.Height, MinSide, MaxPixels)
	}
	src, _, err := image.Decode(bytes.NewReader(b))
	if err != nil {
		return nil, fmt.Errorf("page: %s of %d×%d pixels in %d bytes: %w; want a whole file", format, c.Width, c.Height, len(b), err)
	}
	return onWhite(src), nil
}

// onWhite returns a copy of src on white that starts at (0, 0).
func onWhite(src image.Image) *image.RGBA {
	dst := image.NewRGBA(image.Rectangle{Max: src.Bounds().Size()})
	if o, ok := src.(interface{ Opaque() bool }); ok && o.Opaque() {
		draw.Copy(dst, image.Point{}, src, src.Bounds(), draw.Src, nil)
		return dst
	}
	draw.Draw(dst, dst.Bounds(), image.NewUniform(color.White), image.Point{}, draw.Src)
	draw.Copy(dst, image.Point{}, src, src.Bounds(), draw.Over, nil)
	return dst
}

// scaled returns the part r of src, scaled bilinearly.
func scaled(src *image.RGBA, r image.Rectangle, w, h int) *image.RGBA {
	dst := image.NewRGBA(image.Rect(0, 0, w, h))
	draw.BiLinear.Scale(dst, dst.Bounds(), src, r, draw.Src, nil)
	return dst
}
