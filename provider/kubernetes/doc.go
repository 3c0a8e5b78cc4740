// Package kubernetes keeps what belongs to functions in namespaces of Kubernetes: the functions'
// secrets as Secrets, and a ConfigMap per function that owns the function's pods. It also says
// which namespaces functions may be in.
//
// A function's namespace has the same name in Kubernetes.
package kubernetes
