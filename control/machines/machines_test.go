package machines

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"maps"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// memory is a Store.
type memory struct {
	mu     sync.Mutex
	by     map[string][]byte
	fs     []func(queue.Entry)
	fails  error // of writes
	writes int
	late   time.Duration // of what a watch shows; negative: it shows nothing
}

func (s *memory) write(e queue.Entry) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fails != nil {
		return s.fails
	}
	s.writes++
	if s.by[e.Key] = e.Value; e.Deleted {
		delete(s.by, e.Key)
	}
	for _, f := range s.fs {
		switch {
		case s.late > 0:
			time.AfterFunc(s.late, func() { s.mu.Lock(); defer s.mu.Unlock(); f(e) })
		case s.late == 0:
			f(e)
		}
	}
	return nil
}

func (s *memory) Mark(_ context.Context, key string, value []byte) (uint64, error) {
	return 0, s.write(queue.Entry{Key: key, Value: value})
}

func (s *memory) Delete(_ context.Context, key string) error {
	return s.write(queue.Entry{Key: key, Deleted: true})
}

func (s *memory) Watch(_ context.Context, f func(queue.Entry)) (func(), error) {
	for key, value := range s.by {
		f(queue.Entry{Key: key, Value: value})
	}
	s.fs = append(s.fs, f)
	return func() {}, nil
}

func open(t *testing.T, s *memory) (m *Machines, changes *int, log *bytes.Buffer) {
	t.Helper()
	changes, log = new(int), &bytes.Buffer{}
	m, stop, err := Open(t.Context(), s, func() { *changes++ }, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	return m, changes, log
}

// causes returns why the machines of nodes are closed.
func causes(m *Machines, nodes ...string) map[string]string {
	out := map[string]string{}
	for _, n := range nodes {
		if machine, r, closed := m.Of(n); closed {
			out[machine] = r.Cause
		}
	}
	return out
}

// follow has Follow ask a source that tells states, and then fails with each of the errors.
func follow(t *testing.T, m *Machines, states []map[string]string, errs ...error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	m.Follow(ctx, func(_ context.Context, f func(map[string]string) error) error {
		if len(states) > 0 {
			state := states[0]
			states = states[1:]
			return f(state)
		}
		if len(errs) > 0 {
			err := errs[0]
			errs = errs[1:]
			return err
		}
		cancel()
		return nil
	})
}

// TestFollow closes machines and opens them again. While the source fails, and for the next
// process, the machines stay as they were.
func TestFollow(t *testing.T) { synctest.Test(t, testFollow) }

func testFollow(t *testing.T) {
	t.Helper()
	const cordoned = "its machine is cordoned"
	s := &memory{by: map[string][]byte{}}
	m, changes, log := open(t, s)
	follow(t, m, []map[string]string{{"worker-1": cordoned, "worker-2": cordoned}})
	follow(t, m, []map[string]string{{"worker-1": cordoned, "worker-2": cordoned}}, errors.New("API server away"), errors.New("API server away"))
	if s.writes != 2 || *changes != 2 {
		t.Errorf("%d writes and %d changes, want 2 of each: nothing has changed since", s.writes, *changes)
	}
	if n := strings.Count(log.String(), "API server away"); n != 1 {
		t.Errorf("the error is logged %d times, want once:\n%s", n, log)
	}
	follow(t, m, []map[string]string{{"worker-1": cordoned}})
	next, _, _ := open(t, s)
	for _, m := range []*Machines{m, next} {
		if got := causes(m, "worker-1-abc27", "worker-2-abc27"); !maps.Equal(got, map[string]string{"worker-1": cordoned}) {
			t.Errorf("closed: %v, want worker-1", got)
		}
		if !m.Any() {
			t.Error("no machine is closed, want one")
		}
	}
	if _, r, _ := m.Of("worker-1-abc27"); r.Since.IsZero() {
		t.Error("the record does not say since when the machine is closed")
	}
	follow(t, m, []map[string]string{{"worker-1": "its machine has a taint"}})
	if got := causes(m, "worker-1-abc27"); got["worker-1"] != "its machine has a taint" {
		t.Errorf("closed: %v, want the new cause", got)
	}
	s.fails = errors.New("no room")
	follow(t, m, []map[string]string{{}})
	if !strings.Contains(log.String(), "no room") || !m.Any() {
		t.Errorf("a record that could not be removed: %v, %s", m.by, log)
	}
	s.fails = nil
	if follow(t, m, []map[string]string{{}}); m.Any() {
		t.Errorf("records are left: %v", m.by)
	}
}

// TestLateWatch has records that come back some time after they were written. A machine that is
// opened again at once must not stay closed, and one that is closed again must not stay open.
func TestLateWatch(t *testing.T) { synctest.Test(t, testLateWatch) }

func testLateWatch(t *testing.T) {
	t.Helper()
	const cordoned = "its machine is cordoned"
	s := &memory{by: map[string][]byte{}, late: time.Second}
	m, _, log := open(t, s)
	quick := func(states ...map[string]string) {
		t.Helper()
		ctx, cancel := context.WithCancel(t.Context())
		m.Follow(ctx, func(_ context.Context, f func(map[string]string) error) error {
			defer cancel()
			for _, state := range states {
				if err := f(state); err != nil {
					return err
				}
			}
			return nil
		})
		time.Sleep(time.Minute) // of the test's clock
	}
	closed, none := map[string]string{"worker-1": cordoned}, map[string]string{}
	if quick(closed, none); m.Any() || len(s.by) > 0 {
		t.Errorf("closed, and opened at once: %v", m.by)
	}
	s.writes = 0
	if quick(closed, closed); s.writes != 1 {
		t.Errorf("%d writes, want one: nothing has changed after the first", s.writes)
	}
	if quick(none, closed); !m.Any() || len(s.by) != 1 {
		t.Errorf("opened, and closed at once: %v", m.by)
	}
	s.late = -1
	if quick(none); len(s.by) > 0 {
		t.Errorf("left: %v", s.by)
	}
	if log.Len() == 0 || strings.Contains(log.String(), "level=ERROR") {
		t.Errorf("log: %s", log)
	}
	follow(t, m, []map[string]string{none})
	if !strings.Contains(log.String(), "has not shown a change within 10s") {
		t.Errorf("nothing is said of a watch that shows nothing: %s", log)
	}
}

// TestOf knows only the names that nodes in pods have.
func TestOf(t *testing.T) {
	m, _, _ := open(t, &memory{by: map[string][]byte{"a": []byte(`{"v": 1, "cause": "x"}`), "a-b.c": []byte(`{"v": 1, "cause": "y"}`)}})
	for name, want := range map[string]string{"a-abcde": "a", "a-b.c-22222": "a-b.c", "a": "", "a-abcd": "", "a-abcdef": "", "a-abcd1": "", "a-ABCDE": "", "aaabcde": "", "-abcde": "", "b-abcde": ""} {
		if machine, _, closed := m.Of(name); closed != (want != "") || closed && machine != want {
			t.Errorf("node %q: machine %q, closed: %t; want %q", name, machine, closed, want)
		}
	}
	var none *Machines
	if _, _, closed := none.Of("a-abcde"); closed || none.Any() {
		t.Error("no machines, but one is closed")
	}
}

// TestUnknownRecords closes a machine whose record cannot be read, and replaces the record.
func TestUnknownRecords(t *testing.T) { synctest.Test(t, testUnknownRecords) }

func testUnknownRecords(t *testing.T) {
	t.Helper()
	s := &memory{by: map[string][]byte{"a": []byte("{"), "b": []byte(`{"v": 9, "cause": "x"}`)}}
	m, _, _ := open(t, s)
	got := causes(m, "a-abcde", "b-abcde")
	if !strings.Contains(got["a"], "no JSON object") || !strings.Contains(got["b"], "version 9, want 1") {
		t.Errorf("causes: %v", got)
	}
	follow(t, m, []map[string]string{{"b": "x"}})
	if got := causes(m, "a-abcde", "b-abcde"); !maps.Equal(got, map[string]string{"b": "x"}) {
		t.Errorf("causes: %v, want b's", got)
	}
}
