package provider

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/profile"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// pins is a Pinner with one holder per function.
type pins map[pipeline.Key]Pin

func (p pins) Pin(key pipeline.Key, want Pin) (Held, error) {
	if old, there := p[key]; there && old.Holder != want.Holder {
		return Held{}, fmt.Errorf("%w: %s has it", ErrPinned, old.Holder)
	}
	p[key] = want
	return Held{Replica: "f-1", Ready: true, CPUMilli: want.CPUMilli, Slots: 1, Batch: 4}, nil
}

func (p pins) Unpin(key pipeline.Key, holder string) {
	if p[key].Holder == holder {
		delete(p, key)
	}
}

const points = `{"version":1,"relative":0.05,"points":[
	{"cpuMilli":1000,"batch":1,"length":0,"meanSeconds":0.01,"errSeconds":0.0003,"cv":0.2,"n":80},
	{"cpuMilli":250,"batch":1,"length":0,"meanSeconds":0.04,"errSeconds":0.001,"cv":0.3,"n":60,"loose":true}]}`

// TestProfile follows a profile through its measurement, a restart, a new image, and the function's
// removal.
func TestProfile(t *testing.T) {
	store := newMemoryStore()
	a := newAPI(t, store, nil)
	const echo, path = `{"service":"echo","image":"stagecoach/echo:1"}`, "/system/function/echo/profile"
	a.must(http.StatusNotFound, put, path, points)
	a.must(http.StatusAccepted, post, functions, echo)
	if text := a.must(http.StatusNotFound, get, path, ""); !strings.Contains(text, "stagecoach profile echo") {
		t.Errorf("none yet: %q, want what to do", text)
	}
	a.must(http.StatusAccepted, put, path, points)
	shown := func(a *api) profile.Profile {
		t.Helper()
		return decodeJSON[profile.Profile](t, a.must(http.StatusOK, get, path, ""))
	}
	p := shown(a)
	if p.Stale || p.Function != "echo.openfaas-fn" || p.Image != "stagecoach/echo:1" || time.Since(p.At) > time.Minute || len(p.Points) != 2 ||
		p.Points[0].CPUMilli != 250 || !p.Points[0].Loose || p.Points[1].Mean != 0.01 {
		t.Errorf("stored %+v, want what was sent, sorted, of this function and image", p)
	}
	d, _ := a.Registry.Function(pipeline.ParseKey("echo.openfaas-fn"))
	if got := a.Registry.Points(&d); len(got) != 2 || got[0].CPUMilli != 250 || got[0].Mean != 40*time.Millisecond || got[0].Err != time.Millisecond || got[1].N != 80 {
		t.Errorf("in the words of policies %+v", got)
	}
	if d.Declared.Process = "w"; a.Registry.Points(&d) != nil {
		t.Error("policies see a profile in a shared process, whose CPU cannot be set")
	}

	if again := shown(newAPI(t, store, nil)); !slices.Equal(again.Points, p.Points) || !again.At.Equal(p.At) {
		t.Errorf("after a restart %+v, want %+v", again, p)
	}
	a.must(http.StatusAccepted, put, functions, strings.Replace(echo, "echo:1", "echo:2", 1))
	if p := shown(a); !p.Stale || len(p.Points) != 2 {
		t.Errorf("of another image: %+v, want it to be stale", p)
	}
	d, _ = a.Registry.Function(pipeline.ParseKey("echo.openfaas-fn"))
	if got := a.Registry.Points(&d); got != nil {
		t.Errorf("policies see %+v of a stale profile, want nothing", got)
	}
	old, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	if text := a.must(http.StatusConflict, put, path, string(old)); !strings.Contains(text, "echo:2") {
		t.Errorf("a profile of the image before: %q, want the one there is", text)
	}
	a.must(http.StatusAccepted, put, path, points)
	if shown(a).Stale {
		t.Error("measured anew it is stale")
	}
	a.must(http.StatusAccepted, del, functions, `{"functionName":"echo"}`)
	if n := len(store.entries); n != 0 {
		t.Errorf("%d entries in the store of a removed function: %v", n, store.entries)
	}
	a.must(http.StatusAccepted, post, functions, echo)
	a.must(http.StatusNotFound, get, path, "")
}

// TestBadProfiles checks that invalid profiles in requests are refused with the paths of the bad
// fields, and that invalid stored ones are ignored.
func TestBadProfiles(t *testing.T) {
	store := newMemoryStore()
	a := newAPI(t, store, nil)
	a.must(http.StatusAccepted, post, functions, `{"service":"echo","image":"stagecoach/echo:1"}`)
	const path = "/system/function/echo/profile"
	for body, want := range map[string]string{
		`{}`: "version", `[]`: "body", `{"version":1,"relative":0.05,"points":[]}`: "points: got 0",
		strings.Replace(points, `"version":1`, `"version":2`, 1):                "version: got 2, want 1",
		strings.Replace(points, `"meanSeconds":0.01`, `"meanSeconds":1e400`, 1): "meanSeconds",
		strings.Replace(points, `"meanSeconds":0.01`, `"meanSeconds":-1e-9`, 1): "points[0].meanSeconds: got -1e-09, want above 0",
		strings.Replace(points, `"cpuMilli":250`, `"cpuMilli":1000`, 1):         "points[1]: got cpu, batch and length of points[0]",
		strings.Replace(points, `"errSeconds":0.001`, `"errSeconds":99999`, 1):  "points[1].errSeconds: got 99999, want 0 to 3600",
		strings.Replace(points, `"length":0`, `"length":-1`, 1):                 "points[0].length: got -1",
		strings.Replace(points, `"batch":1`, `"batch":0`, 2):                    "points[1].batch: got 0",
		strings.Replace(points, `"n":80`, `"n":1`, 1):                           "points[0].n: got 1",
		strings.Replace(points, `"relative":0.05`, `"relative":1`, 1):           "relative: got 1",
		strings.Replace(points, `"points":[`, `"points":[`+many(1100)+`{},`, 1): "points: got 1103, want 1 to 1024",
	} {
		if text := a.must(http.StatusBadRequest, put, path, body); !strings.Contains(text, want) {
			t.Errorf("%.60s: %q, want %q", body, text, want)
		}
	}
	for _, stored := range []string{"", "{", `{"version":9}`, strings.Replace(points, `"cv":0.2`, `"cv":-1`, 1)} {
		if _, err := store.Put(t.Context(), profilePrefix+"echo.openfaas-fn", []byte(stored)); err != nil {
			t.Fatal(err)
		}
		b := newAPI(t, store, nil)
		b.must(http.StatusNotFound, get, path, "")
		b.must(http.StatusOK, get, "/system/function/echo", "")
	}
	newAPI(t, store, nil).must(http.StatusAccepted, del, functions, `{"functionName":"echo"}`)
	if n := len(store.entries); n != 0 {
		t.Errorf("%d entries in the store of a removed function: %v", n, store.entries)
	}
}

func many(n int) string { return strings.Repeat("{},", n) }

// TestPinHasOneHolder checks that a function has one holder at a time.
func TestPinHasOneHolder(t *testing.T) {
	a := newAPI(t, newMemoryStore(), nil)
	const path = "/system/function/echo/pin"
	const order = `{"holder":"me","cpuMilli":250,"seconds":10}`
	a.must(http.StatusNotFound, put, path, order)
	a.must(http.StatusNotFound, del, path, "")
	a.must(http.StatusAccepted, post, functions, `{"service":"echo","image":"stagecoach/echo:1","limits":{"cpu":"500m"}}`)
	h := decodeJSON[Held](t, a.must(http.StatusOK, put, path, order))
	if h.Replica != "f-1" || h.CPUMilli != 250 || h.Limit != 500 || h.Image != "stagecoach/echo:1" || h.Revision == 0 || h.Batch != 4 || h.Queue != 1000 {
		t.Errorf("held %+v", h)
	}
	if left := time.Until(a.fakes.pins[pipeline.ParseKey("echo.openfaas-fn")].Until); left <= 0 || left > 10*time.Second {
		t.Errorf("the lease ends in %v, want 10s at most", left)
	}
	if text := a.must(http.StatusConflict, put, path, strings.Replace(order, "me", "you", 1)); !strings.Contains(text, "me has it") {
		t.Errorf("a second holder: %q, want who has it", text)
	}
	a.must(http.StatusOK, del, path+"?holder=you", "")
	if len(a.fakes.pins) != 1 {
		t.Error("somebody else's pin is gone")
	}
	a.must(http.StatusOK, del, path+"?holder=me", "")
	if len(a.fakes.pins) != 0 {
		t.Error("the pin is still there")
	}
	for _, tc := range []struct{ body, want string }{
		{`{"holder":"","seconds":1}`, "holder: got"},
		{`{"holder":"me","seconds":0}`, "seconds: got 0"},
		{`{"holder":"me","seconds":3600}`, "seconds: got 3600"},
		{`{"holder":"me","seconds":1,"cpuMilli":-5}`, "cpuMilli: got -5"},
		{`{"holder":"me","seconds":1,"cpuMilli":9}`, "cpuMilli: got 9"},
		{`{"holder":"me","seconds":1,"cpuMilli":9999999}`, "cpuMilli: got 9999999"},
	} {
		if text := a.must(http.StatusBadRequest, put, path, tc.body); !strings.Contains(text, tc.want) {
			t.Errorf("%s: %q, want %q", tc.body, text, tc.want)
		}
	}
}
