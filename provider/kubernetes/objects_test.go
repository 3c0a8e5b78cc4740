package kubernetes

import (
	"context"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/kubefake"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// deployments are deployed functions, by their keys.
type deployments struct {
	mu   sync.Mutex
	by   map[pipeline.Key]string
	busy chan bool   // answers whether replicas are left; nil: none are
	away atomic.Bool // the process may not change objects
}

func (d *deployments) set(key pipeline.Key, text string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.by[key] = text; text == "" {
		delete(d.by, key)
	}
}

func (d *deployments) spec(key pipeline.Key) (string, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	text, ok := d.by[key]
	return text, ok
}

func (d *deployments) functions() (out []pipeline.Key) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for key := range d.by {
		out = append(out, key)
	}
	return out
}

const mapPath = "namespaces/ns/configmaps/f"

var f = pipeline.Key{Name: "f", Namespace: "ns"}

func derived(t *testing.T, s *kubefake.Server, d *deployments, l *logged) *Objects {
	t.Helper()
	o := NewObjects(ObjectsConfig{
		Cluster: client(t, s), Namespaces: []string{"ns"}, Identity: "one", Spec: d.spec, Functions: d.functions, Log: l.log(),
		Busy: func(pipeline.Key) bool { return d.busy != nil && <-d.busy }, Acts: func() bool { return !d.away.Load() },
	})
	o.pause = time.Millisecond
	return o
}

// awaitMap waits until the function's ConfigMap is as it has to be, or gone if text is empty.
func awaitMap(t *testing.T, s *kubefake.Server, text string) {
	t.Helper()
	s.Await(t, mapPath, func(o object) bool {
		if text == "" {
			return o == nil
		}
		if o == nil {
			return false
		}
		data, _ := o["data"].(object)
		meta := o["metadata"].(object)
		labels, _ := meta["labels"].(object)
		return len(data) == 1 && data["function.json"] == text && o["binaryData"] == nil && meta["ownerReferences"] == nil &&
			labels["app.kubernetes.io/managed-by"] == "stagecoach" && labels["faas_function"] == "f" && labels["stagecoach.dev/cluster"] == "one"
	})
}

// TestObjectsAreKept checks that each function has its ConfigMap, which is repaired when somebody
// edits or deletes it, and goes with the function.
func TestObjectsAreKept(t *testing.T) {
	s := kubefake.Start(t)
	d := &deployments{by: map[pipeline.Key]string{f: "v1", {Name: "f", Namespace: "elsewhere"}: "v1"}}
	s.Put("namespaces/ns/configmaps/left", object{"metadata": object{"labels": object{"app.kubernetes.io/managed-by": "stagecoach", "stagecoach.dev/cluster": "one"}}})
	s.Put("namespaces/ns/configmaps/theirs", object{"metadata": object{"labels": object{"app.kubernetes.io/managed-by": "stagecoach", "stagecoach.dev/cluster": "two"}}})
	o := derived(t, s, d, newLogged())
	background(t, o.Run)
	awaitMap(t, s, "v1")
	// Its function was removed before.
	s.Await(t, "namespaces/ns/configmaps/left", func(o object) bool { return o == nil })
	made := s.Get(mapPath)
	d.set(f, "v2")
	o.Deployed(f)
	awaitMap(t, s, "v2")
	edited := func(change func(o, meta object)) {
		t.Helper()
		o := kubefake.Clone(s.Get(mapPath))
		change(o, o["metadata"].(object))
		s.Put(mapPath, o)
		awaitMap(t, s, "v2")
	}
	edited(func(o, _ object) { o["data"] = object{"function.json": "v0", "more": "x"} })
	edited(func(o, _ object) { o["binaryData"] = object{"b": "eA=="} })
	edited(func(_, meta object) { meta["labels"] = object{"note": "kept"} })
	edited(func(_, meta object) { delete(meta["labels"].(object), "faas_function") })
	edited(func(_, meta object) { meta["ownerReferences"] = []any{object{"kind": "Pod", "name": "x", "uid": "y"}} })
	is := s.Get(mapPath)
	if is["metadata"].(object)["uid"] != made["metadata"].(object)["uid"] || is["metadata"].(object)["labels"].(object)["note"] != "kept" {
		t.Errorf("after edits %v, want the same object with the labels of others", is)
	}
	s.Delete(mapPath)
	awaitMap(t, s, "v2")
	d.set(f, "")
	o.Deployed(f)
	awaitMap(t, s, "")
	if s.Get("namespaces/ns/configmaps/theirs") == nil || s.Get("namespaces/elsewhere/configmaps/f") != nil {
		t.Error("objects of another cluster, or of another namespace, were changed")
	}
}

// TestObjectsOfOthersStay checks that a ConfigMap with a function's name that somebody else has
// made is left alone, and that starts of replicas do not wait for it.
func TestObjectsOfOthersStay(t *testing.T) {
	s := kubefake.Start(t)
	s.Put(mapPath, object{"data": object{"x": "1"}})
	d, l := &deployments{by: map[pipeline.Key]string{f: "v1"}}, newLogged()
	o := derived(t, s, d, l)
	background(t, o.Run)
	l.await(t, "belongs to somebody else")
	o.Await(t.Context(), f)
	if data := s.Get(mapPath)["data"].(object); len(data) != 1 || data["x"] != "1" {
		t.Errorf("the ConfigMap of somebody else: %v", data)
	}
	g := pipeline.Key{Name: "g", Namespace: "ns"}
	s.Put("namespaces/ns/configmaps/g", object{"metadata": object{"labels": object{"app.kubernetes.io/managed-by": "stagecoach", "stagecoach.dev/cluster": "two"}}})
	d.set(g, "v1")
	o.Deployed(g)
	l.await(t, "another installation (label stagecoach.dev/cluster=two)")
	if s.Get("namespaces/ns/configmaps/g")["data"] != nil {
		t.Error("the ConfigMap of another installation is changed")
	}
}

// asked is a context that tells when somebody asks for its end.
type asked struct {
	context.Context

	done chan bool
}

// Done implements context.Context.
func (a asked) Done() <-chan struct{} {
	a.done <- true
	return a.Context.Done()
}

// TestAwaitObject checks that the start of a replica waits for its function's ConfigMap.
func TestAwaitObject(t *testing.T) {
	s := kubefake.Start(t)
	d := &deployments{by: map[pipeline.Key]string{}}
	o := derived(t, s, d, newLogged())
	o.Await(t.Context(), f) // nothing runs: no wait
	listed := make(chan bool, 100)
	arrived, admit := make(chan bool), make(chan bool)
	s.Refuse(func(verb, path string, _ []byte) (int, string) {
		if verb == "watch" {
			listed <- true
		}
		if verb == "create" {
			arrived <- true
			<-admit
		}
		return 0, ""
	})
	background(t, o.Run)
	<-listed
	d.set(f, "v1")
	o.Deployed(f)
	<-arrived
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	o.Await(ctx, f) // ends with its context
	done, waits := make(chan bool), asked{t.Context(), make(chan bool, 100)}
	go func() { defer close(done); o.Await(waits, f) }()
	select {
	case <-done:
		t.Error("the start does not wait for the ConfigMap")
	case <-waits.done:
	}
	close(admit)
	<-done
	awaitMap(t, s, "v1")
}

// TestRemovedFunctionKeepsItsObjectWhileBusy checks that the ConfigMap of a removed function stays
// until the function's replicas have ended, because its deletion ends their pods.
func TestRemovedFunctionKeepsItsObjectWhileBusy(t *testing.T) {
	s := kubefake.Start(t)
	d := &deployments{by: map[pipeline.Key]string{f: "v1"}, busy: make(chan bool)}
	o := derived(t, s, d, newLogged())
	background(t, o.Run)
	awaitMap(t, s, "v1")
	d.set(f, "")
	o.Deployed(f)
	d.busy <- true
	if s.Get(mapPath) == nil {
		t.Error("the ConfigMap is deleted while replicas run")
	}
	d.busy <- false
	awaitMap(t, s, "")
}

// TestObjectsAreTheLeadersAlone checks that a process whose lease has lapsed changes nothing.
func TestObjectsAreTheLeadersAlone(t *testing.T) {
	s := kubefake.Start(t)
	d := &deployments{by: map[pipeline.Key]string{f: "v1"}}
	o := derived(t, s, d, newLogged())
	background(t, o.Run)
	awaitMap(t, s, "v1")
	d.away.Store(true)
	d.set(f, "")
	o.Deployed(f)
	watched := s.Asked("list", "configmaps")
	s.Forget() // all objects are looked at again
	proctest.Until(t, "another list", func() bool { return s.Asked("list", "configmaps") > watched })
	if s.Get(mapPath) == nil {
		t.Error("the ConfigMap is deleted")
	}
	d.away.Store(false)
	awaitMap(t, s, "")
}

// TestImmutableObjectIsMadeAgain checks an edit that only a new object repairs, and that an error
// names the verb and the resource.
func TestImmutableObjectIsMadeAgain(t *testing.T) {
	s := kubefake.Start(t)
	d, l := &deployments{by: map[pipeline.Key]string{f: "v1"}}, newLogged()
	o := derived(t, s, d, l)
	background(t, o.Run)
	awaitMap(t, s, "v1")
	uid := s.Get(mapPath)["metadata"].(object)["uid"]
	s.Refuse(func(verb, _ string, _ []byte) (int, string) {
		if verb == "patch" {
			return http.StatusUnprocessableEntity, "field is immutable"
		}
		return 0, ""
	})
	d.set(f, "v2")
	o.Deployed(f)
	awaitMap(t, s, "v2")
	if s.Get(mapPath)["metadata"].(object)["uid"] == uid {
		t.Error("the object is the same one")
	}
	s.Forbid("create", "configmaps", true)
	s.Delete(mapPath)
	l.await(t, "cannot create resource", "configmaps")
}
