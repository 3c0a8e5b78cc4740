package main

import (
	"context"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestRedeployUnderLoadFailsNoRequest replaces a stage under load, again and again, and no request
// fails.
func TestRedeployUnderLoadFailsNoRequest(t *testing.T) {
	t.Parallel()
	r := start(t)
	hold := waitFn("hold", "50ms", map[string]string{"min": "2", "max": "4"}, nil)
	r.deployAll(diamond(hold)...)
	r.must(http.StatusOK, http.MethodPost, "/function/diamond", "x")
	l := r.load(8, "/function/diamond", crossed)
	for i := range 4 {
		l.turn()
		hold.env["generation"] = fmt.Sprint(i)
		r.deployAll(diamond(hold)...)
		r.until(soon, "replicas of the new revision alone", func() bool {
			s := r.shows("hold")
			return s.Replicas >= 2 && s.Replicas == s.AvailableReplicas && len(r.events("hold", "stopped")) >= 2*(i+1)
		})
	}
	l.turn()
	requests, wrong := l.end()
	for _, w := range wrong {
		t.Error(w)
	}
	if lost := r.events("hold", "lost"); len(lost) > 0 {
		t.Errorf("lost, want drained: %+v", lost)
	}
	t.Logf("%d requests, slowest answer %v", requests, l.slowest)
}

// TestLargeItemsAreRemovedAfterTheRequest sends bodies through a pipeline that are so large that
// they travel by reference, and checks that no blob is left.
func TestLargeItemsAreRemovedAfterTheRequest(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(graph...)
	for _, size := range []int{64<<10 - 1, 64<<10 + 1, 5 << 20} {
		var b strings.Builder
		for range size {
			b.WriteByte(byte('a' + rand.IntN(26)))
		}
		a := r.must(http.StatusOK, http.MethodPost, "/function/five", b.String())
		if want := fmt.Sprintf(`[%q,%[1]q]`, b.String()); string(a.Body) != want {
			t.Errorf("%d bytes in, another %d out", size, len(a.Body))
		}
	}
	r.must(http.StatusRequestEntityTooLarge, http.MethodPost, "/function/five", strings.Repeat("x", 32<<20+1))
	files := 0
	err := filepath.WalkDir(filepath.Join(r.state, "blobs"), func(_ string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			files++
		}
		return err
	})
	if err != nil && !os.IsNotExist(err) || files > 0 {
		t.Errorf("%d blobs are left, %v", files, err)
	}
}

// TestSlotIsFreeWhenItsClientLeaves checks that a request is canceled when its client leaves, and
// that its slot is free at once.
func TestSlotIsFreeWhenItsClientLeaves(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(waitFn("long", "1m", map[string]string{"max": "1"}, nil))
	ctx, leave := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := r.Do(ctx, http.MethodPost, "/function/long", "", nil)
		ended <- err
	}()
	r.until(soon, "the call to run", func() bool { return r.line("long").Running == 1 })
	leave()
	if err := <-ended; err == nil {
		t.Error("an answer after a second of a minute's work")
	}
	r.until(soon, "the call to be canceled", func() bool { tl := r.line("long"); return tl.Running+tl.Waiting == 0 })
	if lost := r.events("long", "lost"); len(lost) > 0 {
		t.Errorf("the replica paid for it: %+v", lost)
	}
}

// TestTimeoutNamesWhereTheRequestWas checks that a request gets 504 at its deadline, and that the
// answer names the stage that it was in.
func TestTimeoutNamesWhereTheRequestWas(t *testing.T) {
	t.Parallel()
	r := start(t)
	hold := waitFn("hold", "1m", map[string]string{"max": "1"}, nil)
	r.deployAll(diamond(hold)...)
	a := r.must(http.StatusGatewayTimeout, http.MethodPost, "/function/diamond", "x", "X-Timeout", "3s")
	if !strings.Contains(string(a.Body), "hold") || a.Took.Seconds() < 3 || a.Took.Seconds() > 60 {
		t.Errorf("after %v: %s, want the stage hold, at 3 s instead of its minute", a.Took, a.Body)
	}
	r.until(soon, "the call to be canceled", func() bool { return r.line("hold").Running == 0 })
	for value, want := range map[string]int{"0s": 400, "2h": 400, "soon": 400} {
		if a := r.send(http.MethodPost, "/function/diamond", "x", "X-Timeout", value); a.Status != want {
			t.Errorf("X-Timeout %s: status %d, want %d: %s", value, a.Status, want, a.Body)
		}
	}
}

// TestRemoveFunctionUnderARequest deletes a function while a request runs on it, and checks that
// nothing of the function is left.
func TestRemoveFunctionUnderARequest(t *testing.T) {
	t.Parallel()
	r := start(t)
	r.deployAll(waitFn("brief", "1m", map[string]string{"max": "1"}, nil))
	got := make(chan client.Answer, 1)
	go func() { got <- r.send(http.MethodPost, "/function/brief", "x") }()
	r.until(soon, "the call to run", func() bool { return r.line("brief").Running == 1 })
	r.must(http.StatusAccepted, http.MethodDelete, "/system/functions", `{"functionName":"brief"}`)
	if a := <-got; a.Status != http.StatusServiceUnavailable || !strings.Contains(string(a.Body), `stage "brief"`) {
		t.Errorf("the call of a removed function: status %d, %s, want 503 with the stage", a.Status, a.Body)
	}
	r.must(http.StatusNotFound, http.MethodPost, "/function/brief", "x")
	r.must(http.StatusNotFound, http.MethodGet, "/system/function/brief", "")
	r.must(http.StatusNotFound, http.MethodGet, "/system/timeline/brief", "")
	r.until(soon, "its processes to end", func() bool { return len(r.descendants()) == 0 })
}
