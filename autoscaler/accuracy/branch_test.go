package accuracy

import "testing"

// TestBadNumbersDoNotEndASearch gives up a node while there is work left, and when there is none.
func TestBadNumbersDoNotEndASearch(t *testing.T) {
	m := &model{}
	s := &search{m: m, given: never, limit: 10}
	s.giveUp(&branch{bound: -0.5})
	s.giveUp(&branch{bound: -0.25})
	if s.ended || s.given != -0.5 {
		t.Errorf("ended %v, bound %v, want the search to go on with a bound of -0.5", s.ended, s.given)
	}
	m.work = 11
	if s.giveUp(&branch{}); !s.ended {
		t.Error("the search has not ended, although its work is used up")
	}
}
