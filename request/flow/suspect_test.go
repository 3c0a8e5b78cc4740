package flow

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

// TestCallThatEndsTwoReplicasIsConvicted checks that a call runs alone after a replica has ended
// under it. If its next replica then ends by itself, the call is convicted: its request ends at
// once with 502. The loss of a replica costs no attempt if the call cannot have caused it.
func TestCallThatEndsTwoReplicasIsConvicted(t *testing.T) {
	const none, shared, company, unclear, alone = task.BlameNone, task.BlameShared, task.BlameCompany, task.BlameUnclear, task.BlameAlone
	for name, tc := range map[string]struct {
		losses []task.Blame
		apart  string // per attempt, including the last: whether it runs alone
		cause  string // empty: the last attempt succeeds
	}{
		"in company once, then well":        {[]task.Blame{company}, "-a", ""},
		"alone once, then well":             {[]task.Blame{alone}, "-a", ""},
		"alone twice":                       {[]task.Blame{alone, alone}, "-a", `function "f.ns": its replica ended 2 times under this call, 2 of them with no other call on it; the last cause: exit status 3;`},
		"in company, then alone":            {[]task.Blame{company, alone}, "-a", "ended 2 times under this call, 1 of them with no other call on it"},
		"in company many times, then well":  {[]task.Blame{company, company, company, company, company}, "-aaaaa", ""},
		"killed from outside, then alone":   {[]task.Blame{unclear, alone}, "-a", "ended 2 times under this call, 1 of them"},
		"killed from outside twice":         {[]task.Blame{unclear, unclear}, "-aa", ""},
		"killed from outside thrice":        {[]task.Blame{unclear, unclear, unclear}, "-aa", "lost its replica in attempt 3 of 3: exit status 3"},
		"with its zygote many times":        {[]task.Blame{shared, shared, shared, shared, shared}, "------", ""},
		"with its zygote, then alone twice": {[]task.Blame{shared, alone, shared, alone}, "--aa", "ended 2 times"},
		"not run three times":               {[]task.Blame{none, none, none}, "---", "lost its replica in attempt 3 of 3"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			w.start(graph(t, "f"), "x")
			apart := ""
			take := func() *task.Task {
				k := w.take("f")
				apart += map[bool]string{true: "a", false: "-"}[k.Alone]
				return k
			}
			for _, b := range tc.losses {
				w.step(Replied{&task.Reply{Key: take().Key, Replica: "r1", Code: task.ReplicaLost, Message: "exit status 3", Blame: b}})
			}
			if tc.cause == "" {
				w.ok(take(), "y")
				w.output("f=y")
			} else {
				w.failed(http.StatusBadGateway, "f", tc.cause)
				convicted := !strings.Contains(tc.cause, "lost its")
				if e := w.end.Error; e.Convicted != convicted || e.Internal == convicted {
					t.Errorf("convicted %v and internal %v, want %v and %v", e.Convicted, e.Internal, convicted, !convicted)
				}
			}
			if apart != tc.apart {
				t.Errorf("attempts that run alone: %q, want %q", apart, tc.apart)
			}
		})
	}
}

// TestEachCallIsItsOwnSuspect checks that of several calls of a stage, only those that lost a
// replica run alone.
func TestEachCallIsItsOwnSuspect(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "a>b;b*"), "x")
	w.ok(w.take("a"), "1", "2")
	first, second := w.take("b"), w.take("b")
	w.step(Replied{&task.Reply{Key: first.Key, Replica: "r1", Code: task.ReplicaLost, Blame: task.BlameAlone}})
	w.step(Replied{&task.Reply{Key: second.Key, Replica: "r2", Code: task.ReplicaLost, Blame: task.BlameShared}})
	first, second = w.take("b"), w.take("b")
	if !first.Alone || second.Alone {
		t.Errorf("alone %v and %v, want the first only", first.Alone, second.Alone)
	}
	w.ok(second, "two")
	w.ok(first, "one")
	w.output("b=one two")
}

// TestAttemptsAreBounded checks that a call is given up eventually, even if it is not to blame for
// the ends of its replicas.
func TestAttemptsAreBounded(t *testing.T) {
	w := newWorld(t)
	w.start(graph(t, "f"), "x")
	for range mostAttempts {
		w.step(Replied{&task.Reply{Key: w.take("f").Key, Replica: "r1", Code: task.ReplicaLost, Message: "its zygote ended", Blame: task.BlameShared}})
	}
	w.failed(http.StatusBadGateway, "f", fmt.Sprintf("lost its replica in each of %d attempts: its zygote ended", mostAttempts))
}
