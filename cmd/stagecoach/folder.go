package main

import "path/filepath"

// storeIn returns the folder of the store in a folder of images. No image's folder can have its
// name.
func storeIn(images string) string { return filepath.Join(images, ".oci") }
