// Package conformance tests what every stage must do, whatever its language. Its suite plays the
// dispatcher of replica processes that use the Go package stage or the Python package stagecoach.
//
// Both run the same test stage: program_test.go and testdata/handler.py. If only one of the two
// packages has a feature, the tests of that package check it.
package conformance
