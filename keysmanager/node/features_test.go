package node

import (
	"reflect"
	"slices"
	"testing"
)

// sendable checks that a daemon of the previous version gets no field that it refuses.
func sendable(t *testing.T, known []string) {
	t.Helper()
	o := fill(reflect.TypeFor[Order](), nil).(Order)
	for _, f := range orderFields("", o.fit(nil)) {
		if !slices.Contains(known, f) {
			t.Errorf("%s: the previous version refuses orders with this field; Order.fit should remove it, see docs/node-protocol.md", f)
		}
	}
}

// TestFitKeepsWhatADaemonKnows checks that orders change only for daemons that refuse them.
func TestFitKeepsWhatADaemonKnows(t *testing.T) {
	o := fill(reflect.TypeFor[Order](), nil).(Order)
	near, far := ImageSource{Node: "a", Address: "unix:/a"}, ImageSource{Control: "up"}
	o.Images.Sources = []ImageSource{near, {Node: "b", Address: "10.0.0.8:7070"}, far}
	if got := o.fit(features()); !reflect.DeepEqual(got, o) {
		t.Errorf("for this release: %+v, want %+v", got, o)
	}
	if got := o.fit(nil).Images.Sources; !slices.Equal(got, []ImageSource{near}) || len(o.Images.Sources) != 3 {
		t.Errorf("for the previous release: sources %+v, want only %+v", got, near)
	}
}
