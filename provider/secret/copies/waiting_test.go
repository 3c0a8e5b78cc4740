package copies

import (
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// slowPeer is a control plane that answers changes of secrets only when it is told to.
type slowPeer struct {
	http.Handler
	slow    func(name string) bool
	arrived chan string   // gets the name of each slow change
	goOn    chan struct{} // closed when slow changes may go on

	mu       sync.Mutex
	now      map[string]int // slow changes under way, by name
	most     int            // under way at the same time
	overlaps bool           // two changes of one secret were under way
	values   []string       // of slow changes, in the order of their ends
}

func (s *slowPeer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("name")
	if r.Method != http.MethodPut || !s.slow(name) {
		s.Handler.ServeHTTP(w, r)
		return
	}
	s.mu.Lock()
	s.now[name]++
	s.overlaps = s.overlaps || s.now[name] > 1
	all := 0
	for _, n := range s.now {
		all += n
	}
	s.most = max(s.most, all)
	s.mu.Unlock()
	s.arrived <- name
	<-s.goOn
	value, _ := io.ReadAll(r.Body)
	s.mu.Lock()
	s.now[name]--
	s.values = append(s.values, string(value))
	s.mu.Unlock()
	w.WriteHeader(http.StatusNoContent)
}

// slowPlane starts a control plane that is slow to take the chosen secrets. The test calls goOn.
func (w *world) slowPlane(name string, slow func(name string) bool) (p *slowPeer, goOn func()) {
	w.t.Helper()
	b := w.plane(name, "")
	p = &slowPeer{Handler: b.Handler(), slow: slow, arrived: make(chan string, 100), goOn: make(chan struct{}), now: map[string]int{}}
	b.server.Config.Handler = p
	goOn = sync.OnceFunc(func() { close(p.goOn) })
	w.t.Cleanup(goOn) // before the server ends
	return p, goOn
}

// TestChangesWaitForThoseOfTheSameSecret has a control plane that takes one secret slowly. Changes
// of other secrets do not wait for it. Changes of this secret do, and keep their order.
func TestChangesWaitForThoseOfTheSameSecret(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	a := w.plane("a", "")
	b, goOn := w.slowPlane("b", func(name string) bool { return name == "slow" })
	a.leads.Store(true)
	var group sync.WaitGroup
	first := make(chan struct{})
	group.Go(func() { w.put(a, "slow", "v1", 1, 1); close(first) })
	<-b.arrived
	group.Go(func() { w.put(a, "slow", "v2", 1, 1) })
	proctest.Until(t, "the second change to wait", func() bool { return a.order.Users("ns/slow") == 2 })

	w.put(a, "quick", "v1", 1, 1)
	if said := a.again(""); said != "" {
		t.Error(said)
	}
	if err := a.Delete(t.Context(), "ns", "quick"); err != nil {
		t.Error(err)
	}
	value, version, err := a.ask(t.Context(), Peer{"a", a.server.Listener.Addr().String()}, "ns/slow")
	if err != nil || string(value) != "v1" || version != 1 {
		t.Errorf("another control plane gets %q, version %d, %v; want v1", value, version, err)
	}
	select {
	case <-first:
		t.Error("the slow change has ended before the others")
	default:
	}
	goOn()
	group.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.overlaps || !slices.Equal(b.values, []string{"v1", "v2"}) || a.value("slow") != "v2" || a.versionOf("ns/slow") != 2 {
		t.Errorf("values %q were sent, at the same time: %v; a has %q", b.values, b.overlaps, a.value("slow"))
	}
}

// TestChangesAreBounded makes more changes than may be under way while another control plane takes
// none.
func TestChangesAreBounded(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	a := w.plane("a", "")
	b, goOn := w.slowPlane("b", func(string) bool { return true })
	var group sync.WaitGroup
	const all = mostChanges + 5
	for i := range all {
		group.Go(func() { w.put(a, fmt.Sprint(i), "v", 1, 1) })
	}
	for range mostChanges {
		<-b.arrived
	}
	proctest.Until(t, "all to have begun", func() bool {
		begun := 0
		for i := range all {
			begun += a.order.Users(fmt.Sprint("ns/", i))
		}
		return begun == all && len(a.slots) == mostChanges
	})
	goOn()
	group.Wait()
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.most != mostChanges || len(b.values) != all {
		t.Errorf("%d of %d changes were under way at the same time, want %d", b.most, len(b.values), mostChanges)
	}
}
