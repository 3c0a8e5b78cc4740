// Package pipeline turns the labels and annotations of functions into pipelines: graphs of stages
// with one entry.
//
// [Parse] reads one function's declaration and refuses faults within that function. [Assemble]
// combines the declarations of a namespace. Functions arrive in any order. So a fault of a graph (a
// missing successor, two entries, a cycle) is not an error, but is listed in the pipeline's
// [Fault]s. It disappears when the missing function is deployed.
//
// The package is pure: it uses the standard library only and does no I/O.
package pipeline
