// Package pipeline turns the labels and annotations of functions into pipelines: graphs of stages
// with one entry.
//
// [Parse] reads one function's declaration and refuses faults within that function. [Assemble]
// combines the declarations of a namespace. Functions may be deployed in any order, so a fault of a
// graph (a missing successor, two entries, a cycle) is not an error. The pipeline lists it as a
// [Fault] until a deployment corrects it.
//
// The package is pure: it uses the standard library only and does no I/O.
package pipeline
