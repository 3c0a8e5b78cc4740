package gateway

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// imageRoot matches the root of an unpacked image, below the folder of images.
const imageRoot = `/\.oci/roots/[0-9a-f]+/fs`

// HidePaths returns a function that replaces paths in a text. It shortens the path of a file in an
// unpacked image to the path that the function sees. It replaces the three folders with STATE,
// IMAGES and RENDEZVOUS. rendezvous is the folder of the socket where replicas meet the gateway.
func HidePaths(state, images, rendezvous string) func(string) string {
	type folder struct{ path, name string }
	var all []folder
	for _, f := range []folder{{rendezvous, "RENDEZVOUS"}, {images, "IMAGES"}, {state, "STATE"}} {
		abs, err := filepath.Abs(f.path)
		if err != nil || abs == "/" {
			continue
		}
		all = append(all, folder{abs, f.name})
		if real, err := filepath.EvalSymlinks(abs); err == nil && real != abs {
			all = append(all, folder{real, f.name})
		}
	}
	// The longest go first, because one folder may be in another.
	slices.SortStableFunc(all, func(a, b folder) int { return len(b.path) - len(a.path) })
	var roots []*regexp.Regexp
	for _, f := range all {
		if f.name == "IMAGES" {
			roots = append(roots, regexp.MustCompile(regexp.QuoteMeta(f.path)+imageRoot))
		}
	}
	return func(text string) string {
		if !strings.Contains(text, "/") {
			return text
		}
		for _, r := range roots {
			text = r.ReplaceAllLiteralString(text, "")
		}
		for _, f := range all {
			text = strings.ReplaceAll(text, f.path, f.name)
		}
		return text
	}
}
