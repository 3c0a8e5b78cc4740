package provider

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// TestLiveAnnotationsKeepTheRevision checks that a deploy keeps the revision of the replicas if it
// changes only annotations that replicas do not see. A restart of Stagecoach keeps it too.
func TestLiveAnnotationsKeepTheRevision(t *testing.T) {
	store := newMemoryStore()
	a := newAPI(t, store, nil)
	key := pipeline.ParseKey("f.openfaas-fn")
	body := func(image, annotations string) string {
		return fmt.Sprintf(`{"service":"f","image":%q,"labels":{"app":"x"},"annotations":{%s}}`, image, annotations)
	}
	deploy := func(method, image, annotations string) (*Deployed, uint64) {
		t.Helper()
		a.must(http.StatusAccepted, method, functions, body(image, annotations))
		d, ok := a.Registry.Function(key)
		if !ok {
			t.Fatal("it is not deployed")
		}
		return &d, d.Revision
	}
	const image = "stagecoach/x:1"
	_, first := deploy(post, image, "")
	for name, value := range map[string]string{
		"accuracy": "0.5", "min-accuracy": "0.4", "batch": "auto:8", "batch-wait": "2ms", "max-length": "128", "weight": "3", "length": "bytes", "rank": "fair", "route": "best", "allocator": "accuracy", "retry-dropped": "true",
	} {
		annotation := fmt.Sprintf(`"stagecoach.dev/%s":%q`, name, value)
		if d, got := deploy(put, image, annotation); got != first || deref(d.Deployment.Annotations)[pipeline.Prefix+name] != value {
			t.Errorf("with %s: revision %d, want %d with the annotation", annotation, got, first)
		}
		if _, got := deploy(put, image, ""); got != first {
			t.Errorf("without %s again: revision %d, want %d", annotation, got, first)
		}
	}
	d, _ := deploy(put, image, `"stagecoach.dev/accuracy":"0.9","stagecoach.dev/max-length":"7"`)
	if f := d.Planned(nil); f.Revision != first || d.Declared.Accuracy != 0.9 || d.Declared.MaxLength != 7 {
		t.Errorf("planned %+v, want revision %d", f, first)
	}
	if again, ok := newAPI(t, store, nil).Registry.Function(key); !ok || again.Revision != first {
		t.Errorf("after a restart: revision %d, want %d", again.Revision, first)
	}
	second := first
	for what, change := range map[string][2]string{
		"nothing":                      {image, `"stagecoach.dev/accuracy":"0.9","stagecoach.dev/max-length":"7"`},
		"another annotation":           {image, `"stagecoach.dev/accuracy":"0.9","stagecoach.dev/max-length":"7","stagecoach.dev/queue-limit":"2"`},
		"the image and a live one too": {"stagecoach/y:1", `"stagecoach.dev/accuracy":"0.8"`},
	} {
		deploy(put, image, `"stagecoach.dev/accuracy":"0.9","stagecoach.dev/max-length":"7"`)
		_, before := deploy(put, image, `"stagecoach.dev/accuracy":"0.9","stagecoach.dev/max-length":"7"`)
		_, got := deploy(put, change[0], change[1])
		if got <= before || got <= second {
			t.Errorf("a deploy that changes %s: revision %d, want above %d", what, got, before)
		}
		second = got
	}
	if _, got := deploy(put, "stagecoach/y:1", `"stagecoach.dev/weight":"2"`); got < second {
		t.Errorf("revision %d after %d", got, second)
	}
}
