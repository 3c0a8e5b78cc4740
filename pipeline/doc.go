// Package pipeline turns what users write on their functions, labels and annotations, into pipelines: graphs of stages
// with one entry.
//
// [Parse] reads one function's declaration and refuses what is wrong in that function alone. [Assemble] puts the
// declarations of a namespace together; functions arrive in any order, so what is wrong with a graph (a missing
// successor, two entries, a cycle) is not an error but the pipeline's list of [Fault]s, and goes away by itself when the
// missing function is deployed.
//
// The package is pure: standard library only, no I/O.
package pipeline
