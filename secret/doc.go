// Package secret keeps functions' secrets as files, readable by this process's user alone: DIR/secrets/NAMESPACE/NAME, and a
// folder DIR/secret-mounts/NAMESPACE/FUNCTION for each function with copies of the secrets that it has named. That folder is
// what a function gets to see. With [OpenShared] it lies elsewhere, and functions that run as other users can read it, each
// namespace its own.
//
// Values are in these files and nowhere else. A [Store] has one owner at a time, who asks for one change after another.
package secret
