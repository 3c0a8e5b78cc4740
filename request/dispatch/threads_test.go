package dispatch

import (
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/wire"
)

func TestThreadsSendsFrameToReplica(t *testing.T) {
	r := newRig(t, Spec{})
	a := attach(t, r.shell, "f-1", 1, 1)
	for range 2 { // the second request changes nothing here: the replica knows how many it has
		if err := r.shell.Threads(pipeline.ParseKey("f.ns"), "f-1", 3); err != nil {
			t.Fatal(err)
		}
		f := a.read(wire.FrameThreads)
		if m, err := wire.DecodeThreads(f.Payload); err != nil || m.Total != 3 {
			t.Errorf("threads %+v, %v, want 3", m, err)
		}
	}
	r.submit("a")
	a.batch("a")
	for _, tc := range []struct {
		function, replica string
		n                 int
		want              string
	}{
		{"f.ns", "f-2", 2, `replica "f-2" of "f.ns": it is not attached`},
		{"g.ns", "f-1", 2, `replica "f-1" of "g.ns": it is not attached`},
		{"f.ns", "f-1", 0, "0, want 1 to 65535"},
		{"f.ns", "f-1", 1 << 16, "65536, want 1 to 65535"},
	} {
		if err := r.shell.Threads(pipeline.ParseKey(tc.function), tc.replica, tc.n); err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%v: %v, want %q", tc, err, tc.want)
		}
	}
}
