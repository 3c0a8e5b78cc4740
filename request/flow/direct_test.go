package flow

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// plane is a nodeStore with one node, which keeps items.
type plane struct {
	*tensor.Dir

	mu      sync.Mutex
	kept    map[string][]byte     // by blob
	offered map[string]tensor.Ref // by the name of the offer
	adopted map[string]bool       // owners
	dropped int                   // of them
	reads   int
	lose    int // the next reads fail
}

func newPlane(d *tensor.Dir) *plane {
	return &plane{Dir: d, kept: map[string][]byte{}, offered: map[string]tensor.Ref{}, adopted: map[string]bool{}}
}

// keep is a node that keeps an item of size bytes.
func (p *plane) keep(owner string, size int) tensor.Item {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := tensor.AppendItem(nil, tensor.Item{ContentType: "x/y", Bytes: make([]byte, size)})
	ref := tensor.Ref{Owner: owner, Blob: fmt.Sprint("kept-", len(p.kept)), Size: int64(len(b)), Keeper: tensor.Keeper{Node: "n"}}
	p.kept[ref.Blob] = b
	return tensor.Item{Ref: &ref}
}

func (p *plane) Adopt(a tensor.Activation) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range a {
		if kept(&a[i]) != "" {
			p.adopted[a[i].Ref.Owner] = true
		}
	}
}

func (p *plane) Offer(ref tensor.Ref) (tensor.Ref, error) {
	if _, err := p.Dir.Get(ref); err != nil {
		return ref, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	name := fmt.Sprint("offered-", len(p.offered))
	p.offered[name] = ref
	return tensor.Ref{Owner: ref.Owner, Blob: name, Size: ref.Size, Keeper: tensor.Keeper{Node: "me", Address: tensor.AtControl}}, nil
}

func (p *plane) Read(_ context.Context, ref tensor.Ref) ([]byte, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.reads++; p.lose > 0 {
		p.lose--
		return nil, errors.New("the node is gone")
	}
	return p.kept[ref.Blob], nil
}

func (p *plane) Drop(owner string) error {
	p.mu.Lock()
	if p.adopted[owner] {
		p.dropped++
	}
	delete(p.adopted, owner)
	p.mu.Unlock()
	return p.Dir.Drop(owner)
}

// got is what an owner has received of a task: the attempt, whether the output may stay, and the
// input.
func (p *plane) got(t *task.Task) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := fmt.Sprintf("%s%d", t.Stage, t.Attempt)
	if t.Keep {
		s += " keep"
	}
	for _, part := range t.Input {
		for _, it := range part.Items {
			switch {
			case it.Ref == nil:
				s += fmt.Sprintf(" %d bytes", len(it.Bytes))
			case it.Ref.Address == tensor.AtControl:
				s += " offer"
			default:
				s += " " + it.Ref.Blob
			}
		}
	}
	return s
}

const big = 200_000 // bytes of a large item

// directRig is a coordinator of requests whose tasks another process owns. It returns what the
// owner has received. work answers a task, given its number.
func directRig(t *testing.T, g pipeline.Pipeline, o *owners, work func(n int, t *task.Task) *task.Reply) (r *rig, p *plane, got func() string) {
	t.Helper()
	r = newRig(t, g, nil, nil)
	p = newPlane(r.store)
	o.c, o.owner = r.Coordinator, "x"
	r.cfg.Remote, r.cfg.Store, r.nodes = o, p, newNodeItems(p)
	r.remote = newRemote(r.Coordinator)
	var mu sync.Mutex
	var all []string
	answer := func(k *task.Task) []*task.Reply {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, p.got(k))
		reply := work(len(all), k)
		reply.Replica = k.Stage + "-1"
		return []*task.Reply{reply}
	}
	for _, process := range o.processes {
		process.work = answer
	}
	t.Cleanup(func() {
		r.close()
		o.calls.Wait()
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.adopted) > 0 {
			t.Errorf("requests whose items nodes still keep: %v", p.adopted)
		}
	})
	return r, p, func() string {
		mu.Lock()
		defer mu.Unlock()
		return strings.Join(all, "; ")
	}
}

// invoke sends a large request, and checks that it is answered with so many bytes.
func (r *rig) invoke(answer int) {
	r.t.Helper()
	resp, terr := r.Invoke(r.t.Context(), request("r", strings.Repeat("x", big)))
	if terr != nil {
		r.t.Fatalf("%+v", terr)
	}
	if it := resp.Output[0].Items[0]; it.Ref != nil || len(it.Bytes) != answer {
		r.t.Errorf("answer %+v of %d bytes, want %d", it.Ref, len(it.Bytes), answer)
	}
}

// messages checks how many large items went in messages.
func (r *rig) messages(sent, received float64) {
	r.t.Helper()
	for direction, want := range map[string]float64{"sent": sent, "received": received} {
		if got := testutil.ToFloat64(r.whole.WithLabelValues(direction)); got != want {
			r.t.Errorf("%v large items %s in messages, want %v", got, direction, want)
		}
	}
}

func knowing() *owners { return &owners{processes: map[string]*process{"x": {knows: ItemsFeature}}} }

// TestItemsOfAnotherProcessesTasksGoDirectly checks that no message has a large item, whether other
// stages, this process or the client need it.
func TestItemsOfAnotherProcessesTasksGoDirectly(t *testing.T) {
	g := graph(t, "a>b;b>c;c")
	g.Stages[1].Length = "bytes" // the output of b is measured
	var p *plane
	r, p, got := directRig(t, g, knowing(), func(n int, k *task.Task) *task.Reply {
		return &task.Reply{Output: tensor.Activation{p.keep(k.Request, n*big)}}
	})
	r.invoke(3 * big)
	// The output of b is stored here.
	if want := "a1 keep offer; b1 keep kept-0; c1 keep offer"; got() != want {
		t.Errorf("the owner got %q, want %q", got(), want)
	}
	r.messages(0, 0)
	if p.reads != 2 || p.dropped != 1 {
		t.Errorf("%d items were read from the node, want the measured one and the answer; %d requests were dropped there, want 1", p.reads, p.dropped)
	}
}

// TestItemsGoWholeWithoutADirectWay checks that items go in messages if the owner is of an earlier
// release, or if a node has no connection.
func TestItemsGoWholeWithoutADirectWay(t *testing.T) {
	for name, o := range map[string]*owners{
		"an earlier release": {processes: map[string]*process{"x": {}}},
		"a node apart":       {apart: true, processes: map[string]*process{"x": {knows: ItemsFeature}}},
	} {
		t.Run(name, func(t *testing.T) {
			r, _, got := directRig(t, graph(t, "a>b;b"), o, func(_ int, k *task.Task) *task.Reply {
				return &task.Reply{Output: k.Input[0].Items}
			})
			r.invoke(big)
			if want := fmt.Sprintf("a1 %d bytes; b1 %d bytes", big, big); got() != want {
				t.Errorf("the owner got %q, want %q", got(), want)
			}
			r.messages(2, 2)
		})
	}
}

// TestReplicasWithoutAWayToThisProcess checks that later inputs of a function go in messages after
// one of its replicas could not fetch an item, and that other functions' inputs do not. The task
// that runs again does not count as an attempt.
func TestReplicasWithoutAWayToThisProcess(t *testing.T) {
	lost := 0
	g := graph(t, "a>b;b")
	for i := range g.Stages {
		g.Stages[i].Idempotent = false
	}
	r, _, got := directRig(t, g, knowing(), func(_ int, k *task.Task) *task.Reply {
		if ref := k.Input[0].Items[0].Ref; k.Stage == "a" && ref != nil {
			lost++
			return &task.Reply{Code: task.InputLost, Message: "no connection", Lost: []string{ref.Blob}}
		}
		return &task.Reply{Output: texts(strings.Repeat("y", big))}
	})
	r.invoke(big)
	r.invoke(big)
	all := strings.Split(got(), "; ")
	if len(all) != 5 || lost != 1 || all[0] != "a1 keep offer" || all[2] != "b1 keep offer" || all[4] != "b1 keep offer" ||
		all[1] != fmt.Sprintf("a2 keep %d bytes", big) || all[3] != fmt.Sprintf("a1 keep %d bytes", big) {
		t.Errorf("the owner got %q", all)
	}
	r.messages(2, 4) // the node keeps nothing
}

// TestLostAnswers loses the answer of a call with its node, before this process has got it.
func TestLostAnswers(t *testing.T) {
	for name, tc := range map[string]struct {
		idempotent bool
		lose       int
		want       string // of tasks
		cause      string
	}{
		"it runs again":        {true, 1, "a1 a2", ""},
		"within bounds":        {true, 99, "a1 a2 a3", "lost its replica in attempt 3 of 3"},
		"it may not run again": {false, 1, "a1", "declared not idempotent"},
	} {
		t.Run(name, func(t *testing.T) {
			g := graph(t, "a")
			g.Stages[0].Idempotent = tc.idempotent
			var p *plane
			r, p, got := directRig(t, g, knowing(), func(_ int, k *task.Task) *task.Reply {
				return &task.Reply{Output: tensor.Activation{p.keep(k.Request, big)}}
			})
			p.lose = tc.lose
			_, terr := r.Invoke(t.Context(), request("r", "x"))
			switch {
			case tc.cause == "" && terr != nil:
				t.Errorf("%+v", terr)
			case tc.cause != "" && (terr == nil || terr.Status != http.StatusBadGateway || !strings.Contains(terr.Cause, tc.cause) || !strings.Contains(terr.Cause, `which node "n" keeps: the node is gone`)):
				t.Errorf("%+v, want 502 with %q", terr, tc.cause)
			}
			if tasks := strings.ReplaceAll(strings.ReplaceAll(got(), " keep 1 bytes", ""), ";", ""); tasks != tc.want {
				t.Errorf("tasks %q, want %q", tasks, tc.want)
			}
		})
	}
}

// TestItemsOfNodesAndAnOwnerOfAnEarlierRelease makes a process of an earlier release the owner
// while a node keeps an item. The stage that made the item runs again, and its output goes in a
// message.
func TestItemsOfNodesAndAnOwnerOfAnEarlierRelease(t *testing.T) {
	o := knowing()
	o.processes["old"] = &process{}
	var p *plane
	r, p, got := directRig(t, graph(t, "a>b;b"), o, func(n int, k *task.Task) *task.Reply {
		if n == 1 {
			o.mu.Lock()
			o.owner = "old"
			o.mu.Unlock()
			return &task.Reply{Output: tensor.Activation{p.keep(k.Request, big)}}
		}
		return &task.Reply{Output: texts(strings.Repeat("y", big))}
	})
	r.invoke(big)
	all := strings.Split(got(), "; ")
	if want := []string{fmt.Sprintf("a2 %d bytes", big), fmt.Sprintf("b2 %d bytes", big)}; len(all) != 3 || all[1] != want[0] || all[2] != want[1] {
		t.Errorf("the owners got %q, want the tasks %q after the first", all, want)
	}
}
