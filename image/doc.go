// Package image makes, keeps and fetches OCI images, without a daemon. No other package imports
// go-containerregistry.
//
// [Pack] turns a folder into an [Image]. The same files give the same digest on every machine. A
// [Store] is a folder with images: an OCI layout, and unpacked root file systems.
//
//   - [Store.Add] adds an image.
//   - [Store.Resolve] returns the digest of a name.
//   - [Store.Root] returns the folder from which an image can run.
//   - [Store.Save] and [Store.Load] exchange images as files.
//   - A [Registry] pulls into a store and pushes from it.
//
// The package trusts no image from outside. It checks digests, limits archives, and lets no name
// lead out of the folder that an archive is unpacked into. A store has an image completely or not
// at all, also after a crash.
package image
