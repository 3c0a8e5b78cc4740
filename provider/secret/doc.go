// Package secret stores functions' secrets as files that only this process's user can read:
// DIR/secrets/NAMESPACE/NAME. Each function has a folder DIR/secret-mounts/NAMESPACE/FUNCTION with
// copies of the secrets that it has named, which is the folder that the function sees. With
// [OpenShared], these folders are elsewhere, and functions that run as other users can read those
// of their namespace.
//
// Values are in these files and nowhere else. A [Store] has one owner at a time, which makes one
// change after another.
package secret
