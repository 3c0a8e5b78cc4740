package console

import "errors"

// ExitError is an error with an exit status of its own.
type ExitError struct {
	Status int
	Err    error
}

// Error implements error.
func (e ExitError) Error() string { return e.Err.Error() }

// Unwrap returns the error without its status.
func (e ExitError) Unwrap() error { return e.Err }

// StatusOf returns the exit status of a program that ends with an error.
func StatusOf(err error) int {
	var e ExitError
	if errors.As(err, &e) {
		return e.Status
	}
	return 1
}
