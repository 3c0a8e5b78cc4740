package warden

import (
	"strings"
	"testing"
	"time"
)

// TestAnotherRuntimeIsRefused starts a warden, and asks for it as one that runs processes in
// something else.
func TestAnotherRuntimeIsRefused(t *testing.T) {
	l := launcher(t, time.Minute)
	c, err := Launch(t.Context(), l)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	l.Runs = "containers"
	if c, err := Launch(t.Context(), l); err == nil || !strings.Contains(err.Error(), "no containers, want containers: end the node's processes first (kill ") {
		t.Errorf("%v, %v, want an error that says what to do", c, err)
	}
	l.Runs = ""
	if c, err = Launch(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	c.Close()
}
