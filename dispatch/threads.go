package dispatch

import (
	"errors"
	"fmt"
)

// Threads asks a replica to compute with n threads, at least one. One that has as many, or cannot have more, changes nothing.
func (s *Shell) Threads(function, replica string, n int) error {
	f := s.function(function)
	if f == nil || f.link(replica) == nil {
		return fmt.Errorf("threads of replica %q of %q: it is not attached", replica, function)
	}
	return errors.ErrUnsupported
}
