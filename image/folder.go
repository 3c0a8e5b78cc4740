package image

import "path/filepath"

// Folder returns the folder of the store in a folder of images. No image's folder can have its
// name.
func Folder(images string) string { return filepath.Join(images, ".oci") }
