// Package kubefake is an API server of Kubernetes for tests of its clients. It has objects of the
// core API without checking them: get, list, watch, create, merge patch and delete. It deletes no
// dependents.
package kubefake

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// Object is an object in its JSON form.
type Object = map[string]any

// Server is an API server. Its methods are safe for concurrent use.
type Server struct {
	URL     string
	Account string // folder with credentials

	mu      sync.Mutex
	version int
	objects map[string]Object // by the path below /api/v1
	changes chan struct{}     // closed by the next change
	events  []event
	oldest  int             // version of the earliest event that is kept
	refused map[string]bool // by verb and resource
	asked   map[string]int  // by verb and resource
	refuse  func(verb, path string, body []byte) (status int, message string)
}

type event struct {
	version int
	kind    string
	path    string
	object  Object
	before  Object
}

// Start starts an API server that ends with the test.
func Start(t testing.TB) *Server {
	t.Helper()
	s := &Server{objects: map[string]Object{}, changes: make(chan struct{}), refused: map[string]bool{}, asked: map[string]int{}, Account: t.TempDir()}
	h := httptest.NewTLSServer(s)
	t.Cleanup(func() { h.CloseClientConnections(); h.Close() })
	s.URL = h.URL
	for name, text := range map[string]string{
		"token": "good\n", "ca.crt": string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: h.Certificate().Raw})),
	} {
		if err := os.WriteFile(filepath.Join(s.Account, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// Forbid makes the server refuse a verb for a resource, or admit it again.
func (s *Server) Forbid(verb, resource string, forbidden bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refused[verb+" "+resource] = forbidden
}

// Refuse makes the server ask f about each request. A status of 0 admits it.
func (s *Server) Refuse(f func(verb, path string, body []byte) (status int, message string)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.refuse = f
}

// Asked returns how many requests there were.
func (s *Server) Asked(verb, resource string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[verb+" "+resource]
}

// Put creates or replaces the object at a path below /api/v1, as somebody else does.
func (s *Server) Put(path string, o Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.put(path, o)
}

// Get returns the object at a path; nil: there is none.
func (s *Server) Get(path string) Object {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.objects[path]
}

// Delete deletes the object at a path, as somebody else does.
func (s *Server) Delete(path string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(path)
}

// Await waits until the object at a path is as ok says; nil: there is none.
func (s *Server) Await(t testing.TB, path string, ok func(Object) bool) {
	t.Helper()
	last := Object{}
	defer func() {
		if t.Failed() {
			t.Logf("last seen at %s: %v", path, last)
		}
	}()
	proctest.Until(t, path, func() bool { last = s.Get(path); return ok(last) })
}

// Forget makes watches begin again: the server forgets all changes so far.
func (s *Server) Forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	s.events, s.oldest = nil, s.version
	s.note()
}

func (s *Server) put(path string, o Object) Object {
	s.version++
	o = Clone(o)
	meta, _ := o["metadata"].(Object)
	if meta == nil {
		meta = Object{}
		o["metadata"] = meta
	}
	parts := strings.Split(path, "/")
	meta["name"], meta["resourceVersion"] = parts[len(parts)-1], strconv.Itoa(s.version)
	if parts[0] == "namespaces" && len(parts) > 2 {
		meta["namespace"] = parts[1]
	}
	before, kind := s.objects[path], "ADDED"
	if before != nil {
		kind = "MODIFIED"
		meta["uid"] = before["metadata"].(Object)["uid"]
	} else {
		meta["uid"] = fmt.Sprintf("uid-%d", s.version)
	}
	s.objects[path] = o
	s.events = append(s.events, event{s.version, kind, path, o, before})
	s.note()
	return o
}

func (s *Server) remove(path string) {
	o := s.objects[path]
	if o == nil {
		return
	}
	s.version++
	delete(s.objects, path)
	s.events = append(s.events, event{s.version, "DELETED", path, o, o})
	s.note()
}

func (s *Server) note() {
	close(s.changes)
	s.changes = make(chan struct{})
}

// Clone returns a copy in the types of JSON.
func Clone(o Object) (out Object) {
	b, err := json.Marshal(o)
	if err == nil {
		err = json.Unmarshal(b, &out)
	}
	if err != nil {
		panic(err)
	}
	return out
}

// resourceOf returns the resource of a path, and whether the path names one object.
func resourceOf(path string) (resource string, one bool) {
	parts := strings.Split(path, "/")
	if parts[0] == "namespaces" && len(parts) > 2 {
		return parts[2], len(parts) > 3
	}
	return parts[0], len(parts) > 1
}

// verbOf returns the verb of a request.
func verbOf(r *http.Request, one bool) string {
	switch {
	case r.URL.Query().Get("watch") == "true":
		return "watch"
	case r.Method == http.MethodGet && one:
		return "get"
	case r.Method == http.MethodGet:
		return "list"
	}
	return map[string]string{http.MethodPost: "create", http.MethodPatch: "patch", http.MethodDelete: "delete"}[r.Method]
}

func fail(w http.ResponseWriter, status int, message string) {
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(Object{"kind": "Status", "code": status, "message": message})
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := strings.TrimPrefix(r.URL.Path, "/api/v1/")
	resource, one := resourceOf(path)
	verb := verbOf(r, one)
	var body json.RawMessage
	if r.Method != http.MethodGet {
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			fail(w, http.StatusBadRequest, err.Error())
			return
		}
	}
	s.mu.Lock()
	s.asked[verb+" "+resource]++
	refuse, forbidden := s.refuse, s.refused[verb+" "+resource]
	s.mu.Unlock()
	if forbidden {
		fail(w, http.StatusForbidden, fmt.Sprintf(`%s is forbidden: User "test" cannot %s resource %q`, resource, verb, resource))
		return
	}
	if refuse != nil {
		if status, message := refuse(verb, path, body); status != 0 {
			fail(w, status, message)
			return
		}
	}
	if verb == "watch" {
		s.watch(w, r, path)
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answer(w, r, verb, path, body)
}

// answer answers a request other than a watch. The caller holds s.mu.
func (s *Server) answer(w http.ResponseWriter, r *http.Request, verb, path string, body json.RawMessage) {
	resource, _ := resourceOf(path)
	o := s.objects[path]
	var sent Object
	if len(body) > 0 {
		_ = json.Unmarshal(body, &sent)
	}
	switch {
	case verb == "list":
		items := []Object{}
		for _, at := range slices.Sorted(maps.Keys(s.objects)) {
			if within(at, path) && selected(s.objects[at], r.URL.Query().Get("labelSelector")) {
				items = append(items, partial(r, s.objects[at]))
			}
		}
		_ = json.NewEncoder(w).Encode(Object{"metadata": Object{"resourceVersion": strconv.Itoa(s.version)}, "items": items})
	case verb == "create":
		name, _ := sent["metadata"].(Object)["name"].(string)
		if path += "/" + name; s.objects[path] != nil {
			fail(w, http.StatusConflict, fmt.Sprintf("%s %q already exists", resource, name))
			return
		}
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(s.put(path, sent))
	case o == nil:
		fail(w, http.StatusNotFound, fmt.Sprintf("%s %q not found", resource, path[strings.LastIndexByte(path, '/')+1:]))
	case verb == "get":
		_ = json.NewEncoder(w).Encode(o)
	case verb == "patch" && r.Header.Get("Content-Type") == "application/merge-patch+json":
		_ = json.NewEncoder(w).Encode(s.put(path, merge(Clone(o), sent)))
	case verb == "delete":
		conditions, _ := sent["preconditions"].(Object)
		if uid := conditions["uid"]; uid != nil && uid != o["metadata"].(Object)["uid"] {
			fail(w, http.StatusConflict, "the UID in the precondition does not match")
			return
		}
		s.remove(path)
		_ = json.NewEncoder(w).Encode(Object{"kind": "Status", "status": "Success"})
	default:
		fail(w, http.StatusMethodNotAllowed, "not built")
	}
}

// watch sends changes until the client ends the request.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, path string) {
	from, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	for {
		s.mu.Lock()
		changes, old := s.changes, from < s.oldest
		var due []event
		for _, e := range s.events {
			if e.version > from && within(e.path, path) {
				due = append(due, e)
			}
		}
		from = s.version
		s.mu.Unlock()
		if old {
			_ = json.NewEncoder(w).Encode(Object{"type": "ERROR", "object": Object{"kind": "Status", "code": http.StatusGone, "message": "too old resource version"}})
			return
		}
		for _, e := range due {
			if kind := seenAs(e, r.URL.Query().Get("labelSelector")); kind != "" {
				_ = json.NewEncoder(w).Encode(Object{"type": kind, "object": partial(r, e.object)})
			}
		}
		w.(http.Flusher).Flush()
		select {
		case <-changes:
		case <-r.Context().Done():
			return
		}
	}
}

// seenAs returns how a watch with a selector sees a change; empty: not at all.
func seenAs(e event, selector string) string {
	was := e.before != nil && selected(e.before, selector)
	is := e.kind != "DELETED" && selected(e.object, selector)
	switch {
	case was && is:
		return "MODIFIED"
	case was:
		return "DELETED"
	case is:
		return "ADDED"
	}
	return ""
}

// within reports whether an object is one of the collection at a path.
func within(object, collection string) bool {
	rest, ok := strings.CutPrefix(object, collection+"/")
	return ok && !strings.Contains(rest, "/")
}

// selected reports whether an object has the labels of a selector: a=b, and a in (b,c).
func selected(o Object, selector string) bool {
	meta, _ := o["metadata"].(Object)
	labels, _ := meta["labels"].(Object)
	for selector != "" {
		name, rest, in := strings.Cut(selector, " in (")
		if in && !strings.Contains(name, "=") {
			values, more, _ := strings.Cut(rest, ")")
			if have, _ := labels[name].(string); !slices.Contains(strings.Split(values, ","), have) {
				return false
			}
			selector = strings.TrimPrefix(more, ",")
			continue
		}
		term, more, _ := strings.Cut(selector, ",")
		name, value, _ := strings.Cut(term, "=")
		if have, there := labels[name].(string); !there || have != value {
			return false
		}
		selector = more
	}
	return true
}

// partial returns an object in the form that the client accepts.
func partial(r *http.Request, o Object) Object {
	if strings.Contains(r.Header.Get("Accept"), "as=PartialObjectMetadata") {
		return Object{"metadata": o["metadata"]}
	}
	return o
}

// merge applies a patch of RFC 7386.
func merge(o, patch Object) Object {
	for name, value := range patch {
		inner, ok := value.(Object)
		switch {
		case value == nil:
			delete(o, name)
		case ok:
			old, _ := o[name].(Object)
			if old == nil {
				old = Object{}
			}
			o[name] = merge(old, inner)
		default:
			o[name] = value
		}
	}
	return o
}
