// Package conformance holds what every stage has to do whatever language it is written in: one suite, run as a dispatcher
// against replicas that are processes, of the Go package stage and of the Python package stagecoach.
//
// Both run the same test stage: program_test.go, and testdata/handler.py. What only one of them has is tested beside it.
package conformance
