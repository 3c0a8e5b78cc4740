// Package conformance tests what every sandbox.Runtime must do: the one that starts processes, and
// the one that starts containers. What only one of them does is tested in its own package.
package conformance
