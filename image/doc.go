// Package image makes, keeps and fetches OCI images, without a daemon: it alone imports go-containerregistry.
//
// [Pack] turns a folder into an [Image]: the same files give the same digest, whenever and wherever. A [Store] is a folder
// with images, an OCI layout beside their unpacked root file systems: [Store.Add] takes an image in, [Store.Resolve] says
// which digest a name stands for, [Store.Root] is where the image with a digest can be run from, [Store.Save] and
// [Store.Load] exchange images with others as files. A [Registry] pulls into a store and pushes from it.
//
// What comes from outside is taken for hostile: digests are checked, archives are bounded, and nothing in them leads out of
// the folder they are unpacked into. An image is in a store as a whole or not at all, also after a crash.
package image
