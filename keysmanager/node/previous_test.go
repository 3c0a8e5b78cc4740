package node

import (
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/previous"
)

// TestReadsThePreviousVersion decodes messages that the previous version has sent. No field may get
// lost.
func TestReadsThePreviousVersion(t *testing.T) {
	check := func(m previous.Message, v any, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", m.Subject, err)
			return
		}
		previous.Kept(t, m, v)
	}
	of := func(last string) []previous.Message { return previous.Messages(t, "stagecoach.v1.node.", last) }
	for _, m := range of(".inventory") {
		inv, err := DecodeInventory(m.Data())
		check(m, inv, err)
	}
	for _, m := range of(".order") {
		o, err := DecodeOrder(m.Data())
		check(m, o, err)
	}
	for _, m := range of(".event") {
		e, err := DecodeEvent(m.Data())
		check(m, e, err)
	}
	for _, m := range previous.Messages(t, "stagecoach.v1.node.left.answer.", "") {
		a, err := DecodeAnswer(m.Data())
		check(m, a, err)
	}
}
