package flow

import (
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// neighbour is a dispatcher in the same process that owns some functions and echoes.
type neighbour struct {
	c     *Coordinator
	owns  string
	tasks sync.WaitGroup

	asked    chan string // stages whose tasks were submitted
	expected chan string // functions that Expect named; nil: not recorded

	mu       sync.Mutex
	canceled []task.Key
	left     []string
}

func (n *neighbour) Submit(t *task.Task) bool {
	if !strings.Contains(n.owns, t.Stage) {
		return false
	}
	n.asked <- t.Stage
	if string(t.Input[0].Items[0].Bytes) != "never" {
		n.tasks.Go(func() {
			if n.c.Reply("elsewhere", &task.Reply{Key: t.Key}) || !n.c.Reply(t.ReplyTo, echo(t)) {
				panic("a reply went to the wrong coordinator")
			}
		})
	}
	return true
}

func (n *neighbour) Expect(function string) {
	if n.expected != nil {
		n.expected <- function
	}
}

func (n *neighbour) Cancel(function string, k task.Key) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.canceled = append(n.canceled, k)
	return strings.Contains(n.owns, strings.TrimSuffix(function, ".ns"))
}

func (n *neighbour) Leave(function, request string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.left = append(n.left, function)
	return strings.Contains(n.owns, strings.TrimSuffix(function, ".ns"))
}

func echo(t *task.Task) *task.Reply { return &task.Reply{Key: t.Key, Output: t.Input[0].Items} }

// TestTasksStayInProcessIfTheDispatcherDoes checks that stages whose dispatchers are in this
// process get no message over the bus, and that the others do.
func TestTasksStayInProcessIfTheDispatcherDoes(t *testing.T) {
	far := make(chan string, 10)
	r := newRig(t, graph(t, "a>b;b>c;c"), nil, func(x *task.Task) *task.Reply { far <- x.Stage; return echo(x) })
	near := &neighbour{c: r.Coordinator, owns: "ac", asked: make(chan string, 10)}
	r.cfg.Near = near // set before the first request
	resp, terr := r.Invoke(t.Context(), request("r", "hello"))
	if terr != nil || string(resp.Output[0].Items[0].Bytes) != "hello" {
		t.Fatalf("got %+v, %v", resp, terr)
	}
	if len(near.asked) != 2 || <-near.asked != "a" || <-near.asked != "c" || len(far) != 1 || <-far != "b" {
		t.Fatalf("the neighbour got %d more stages, want a and c alone, and the bus b", len(near.asked))
	}
	near.tasks.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan *task.Error, 1)
	go func() { _, terr := r.Invoke(ctx, request("s", "never")); done <- terr }()
	<-near.asked
	cancel()
	if terr := <-done; terr == nil {
		t.Error("a canceled request has a response")
	}
	if len(near.canceled) != 1 {
		t.Errorf("the neighbour got %d cancels, want 1", len(near.canceled))
	}
	r.close()
}
