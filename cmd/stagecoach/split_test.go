package main

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

const (
	// healLimit bounds the time from the end of a partition until everything works.
	healLimit = time.Minute
	// noticed is the time after which the leader knows that the connection with a node is lost: at
	// most 20 s until the connection ends, and 3 s to connect again. The rest is for a busy machine.
	noticed = 28 * time.Second
	// resigned is the time after noticed in which a leader gives the lead to another control plane:
	// 5 s to drain, less what noticed has for a busy machine.
	resigned = 4 * time.Second
)

// TestPartitions cuts links between the machines of a cluster, at random, while clients send
// requests of all kinds to all control planes. SPLIT_ROUNDS sets the number of partitions,
// SPLIT_SEED the seed, SPLIT_ONLY a part of the names of the partitions, and SPLIT_LOGS a folder
// for the logs of all processes. Without SPLIT_ROUNDS, it is skipped: make test-split sets it.
func TestPartitions(t *testing.T) {
	rounds, seed := int(envNumber(t, "SPLIT_ROUNDS", 0)), envNumber(t, "SPLIT_SEED", rand.Uint64())
	if rounds == 0 {
		t.Skip("takes minutes: run make test-split")
	}
	t.Logf("seed %d", seed)
	chance := rand.New(rand.NewPCG(seed, 0))
	s := startSplit(t)
	pipe, runs := s.countRuns()
	h := newHistory(seed)
	receiver := httptest.NewUnstartedServer(h)
	receiver.Listener = s.net.Clients.Listen(0)
	receiver.Start()
	t.Cleanup(receiver.Close)
	env := map[string]string{"runs": pipe}
	// Both nodes have replicas of both functions.
	s.controls[0].deployAll(
		fn{"often", "test/runs:1", map[string]string{"min": "2", "max": "4"}, nil, env},
		fn{"once", "test/runs:1", map[string]string{"min": "2", "max": "4"}, map[string]string{"idempotent": "false"}, env},
	)
	if took, wrong := s.answers(late); len(wrong) > 0 {
		t.Fatalf("the cluster does not begin to work within %v: %q", took, wrong)
	}
	stop := h.load(s, receiver.URL)
	for round := range rounds {
		f := s.fault(chance, os.Getenv("SPLIT_ONLY"))
		most := 15 * time.Second
		if f.tunnels() {
			most = 40 * time.Second // both ends of a tunnel take up to 20 s to notice
		}
		held := time.Second + time.Duration(chance.Int64N(int64(most-time.Second)))
		lead := s.leader()
		s.net.Cut(f.cuts...)
		pause(held)
		during := s.leader()
		if f.node >= 0 && held > noticed {
			s.told(f)
		}
		if cut := lead >= 0 && strings.HasPrefix(f.name, fmt.Sprintf("control plane %d from all nodes", lead)); cut && held > noticed+resigned && during == lead {
			t.Errorf("round %d: %s for %v: control plane %d still leads", round, f.name, held, lead)
		}
		s.net.Heal()
		s.alive()
		took, wrong := s.answers(healLimit)
		back := s.nodesReturn(healLimit)
		t.Logf("round %d: %s for %v; control plane %d led, then %d, now %d; everything works %v later, and all nodes are back after %v more",
			round, f.name, held.Round(time.Millisecond), lead, during, s.leader(), took.Round(time.Millisecond), back.Round(time.Millisecond))
		for _, w := range wrong {
			t.Errorf("round %d: %s for %v: %v after it: %s", round, f.name, held, healLimit, w)
		}
	}
	stop()
	for limit := time.Now().Add(late); h.waiting() > 0 && time.Now().Before(limit); {
		pause(50 * time.Millisecond) // check says which are left
	}
	h.check(t, s, runs())
	s.nothingIsLeft()
}

// alive checks that no partition has ended a control plane or a daemon.
func (s *splitRig) alive() {
	s.t.Helper()
	for i, r := range s.controls {
		if len(r.up.Done) > 0 {
			s.t.Fatalf("control plane %d has ended", i)
		}
	}
	for i, d := range s.daemons {
		if len(d.Done) > 0 {
			s.t.Fatalf("the daemon of node %d has ended", i)
		}
	}
}

// pause waits where there is no event: for a partition to last, or before another look.
func pause(d time.Duration) { <-time.After(d) }

// history has what clients of a cluster sent and got.
type history struct {
	ledger
	answers map[string]int           // by status, or the kind of an error
	wrong   []string                 // answers that no fault explains
	slowest map[string]time.Duration // by status
	failed  map[string]string        // an example of each status
}

func newHistory(seed uint64) *history {
	return &history{
		ledger:  ledger{chance: rand.New(rand.NewPCG(seed, 1)), accepted: map[string]bool{}, told: map[string]int{}},
		answers: map[string]int{}, slowest: map[string]time.Duration{}, failed: map[string]string{},
	}
}

// load sends requests of all kinds to all control planes until stop is called.
func (h *history) load(s *splitRig, back string) (stop func()) {
	end := make(chan struct{})
	var clients sync.WaitGroup
	for i, r := range s.controls {
		for kind, path := range map[string]string{"often": "/function/often", "once": "/function/once", "async": "/async-function/often"} {
			clients.Go(func() {
				for n := 0; ; n++ {
					select {
					case <-end:
						return
					case <-time.After(30 * time.Millisecond):
					}
					// The ledger takes the last number as that of the request; none is large here.
					name := fmt.Sprintf("%s-%d-%d", kind, i, n*40)
					header := []string{"X-Timeout", "20s"}
					if kind == "async" {
						header = append(header, "X-Callback-Url", back+"/?"+name)
					}
					got, err := r.trySend(http.MethodPost, path, name, header...)
					h.answered(kind, name, got.Status, string(got.Body), got.Took, err)
				}
			})
		}
	}
	return func() { close(end); clients.Wait() }
}

// answered records an answer.
func (h *history) answered(kind, name string, status int, body string, took time.Duration, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	what := kind + " " + strconv.Itoa(status)
	switch {
	case err != nil:
		what = kind + " error" // of the connection: the control plane has begun again
		body = err.Error()
	case status == http.StatusAccepted && kind == "async":
		h.accepted[name] = true
	case status == http.StatusOK && kind != "async":
		if body != name {
			h.wrong = append(h.wrong, fmt.Sprintf("%s: answered with %.100q", name, body))
		}
	case slices.Contains([]int{http.StatusServiceUnavailable, http.StatusBadGateway, http.StatusGatewayTimeout, http.StatusTooManyRequests}, status):
	default:
		h.wrong = append(h.wrong, fmt.Sprintf("%s: status %d: %.300s", name, status, body))
	}
	h.answers[what]++
	h.slowest[what] = max(h.slowest[what], took)
	if err != nil || status >= http.StatusMultipleChoices {
		h.failed[what] = name + ": " + body
	}
}

// led is a line of a log in which a control plane says that it leads.
var led = regexp.MustCompile(`time=(\S+) .*msg="this control plane leads" epoch=(\d+)`)

// epochs is in the lines of a daemon's log that have an epoch.
var epochs = regexp.MustCompile(`msg="order accepted" .*epoch=(\d+)`)

// check checks the history, after all partitions.
func (h *history) check(t *testing.T, s *splitRig, runs map[string]int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, w := range slices.Concat(h.wrong, h.ledger.wrong) {
		t.Error(w)
	}
	for name := range h.accepted {
		if h.told[name] == 0 {
			t.Errorf("%s was accepted, and its client was told no result", name)
		}
		if runs[name] == 0 {
			t.Errorf("%s was accepted, and has never run", name)
		}
	}
	again := 0
	for name, n := range runs {
		if n > 1 && strings.HasPrefix(name, "once-") {
			t.Errorf("%s ran %d times, want at most once", name, n)
		}
		if n > 1 && name != "probe" {
			again++
		}
	}
	h.checkEpochs(t, s)
	for _, what := range slices.Sorted(maps.Keys(h.answers)) {
		t.Logf("%-12s %6d, the slowest after %v; %.250s", what, h.answers[what], h.slowest[what].Round(time.Millisecond), h.failed[what])
	}
	t.Logf("%d accepted, %d deliveries marked as repetitions, %d requests ran more than once", len(h.accepted), h.marked, again)
}

// checkEpochs checks that no two holdings have the same epoch, that epochs rise, and that nodes
// accept orders of rising epochs only.
func (h *history) checkEpochs(t *testing.T, s *splitRig) {
	type holding struct {
		at    string
		epoch int
		who   int
	}
	var all []holding
	for i, r := range s.controls {
		for _, m := range led.FindAllStringSubmatch(r.log.String(), -1) {
			epoch, err := strconv.Atoi(m[2])
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, holding{m[1], epoch, i})
		}
	}
	slices.SortFunc(all, func(a, b holding) int { return strings.Compare(a.at, b.at) })
	for i := 1; i < len(all); i++ {
		if all[i].epoch <= all[i-1].epoch {
			t.Errorf("control plane %d leads with epoch %d at %s, after control plane %d with epoch %d", all[i].who, all[i].epoch, all[i].at, all[i-1].who, all[i-1].epoch)
		}
	}
	orders := 0
	for i, d := range s.daemons {
		before := 0
		for _, m := range epochs.FindAllStringSubmatch(d.log.String(), -1) {
			epoch, err := strconv.Atoi(m[1])
			if err != nil {
				t.Fatal(err)
			}
			if epoch < before {
				t.Errorf("node %d accepts an order of epoch %d after one of epoch %d", i, epoch, before)
			}
			before = epoch
			orders++
		}
	}
	if orders == 0 {
		t.Error("no node has accepted an order: the test proves nothing")
	}
	t.Logf("%d changes of the leader, %d orders", len(all)-1, orders)
}

// nothingIsLeft waits until the nodes have the replicas that the leader knows, and no others.
func (s *splitRig) nothingIsLeft() {
	s.t.Helper()
	var replicas []process
	known := -1
	for limit := time.Now().Add(healLimit); known != len(replicas) && time.Now().Before(limit); pause(100 * time.Millisecond) {
		replicas = slices.DeleteFunc(allProcesses(), func(p process) bool {
			cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", p.pid))
			return err != nil || !strings.HasPrefix(cwd, s.images+"/") // another program's, of this machine
		})
		known = 0
		for _, name := range []string{"often", "once"} {
			known += s.controls[0].shows(name).AvailableReplicas
		}
	}
	if known != len(replicas) {
		s.t.Errorf("%d replicas run, and the leader knows %d: %+v", len(replicas), known, replicas)
	}
	for i, r := range s.controls {
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", r.up.Cmd.Process.Pid))
		if err != nil {
			s.t.Error(err)
		}
		s.t.Logf("control plane %d has %d open files and %v goroutines", i, len(files), r.value("go_goroutines"))
	}
	s.t.Logf("%d replicas", len(replicas))
}
