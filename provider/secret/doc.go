// Package secret stores functions' secrets as files that only this process's user can read:
// DIR/secrets/NAMESPACE/NAME. A function sees copies of the secrets that it names, in its folder
// DIR/secret-mounts/NAMESPACE/FUNCTION/SET; SET stands for the names. With [OpenShared], these
// folders are elsewhere. Functions then run as other users and can read their own folder.
//
// Values are in these files and nowhere else. A [Store] has one owner at a time, which makes one
// change after another.
package secret
