package wire

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestWaitsNumbers checks the numbers of calls of a batch that lost one of them while it waited.
func TestWaitsNumbers(t *testing.T) {
	var w Waits
	w.Add(1, 3, func(error) { t.Error("the fetch is ended") })
	if got := w.Cancel(1, 0); len(got.Answer) != 1 || got.Answer[0] != 0 || got.Pass {
		t.Errorf("while it waits: %+v", got)
	}
	calls := w.Left(1)
	if !w.Give(1, calls, func() {}) {
		t.Error("it is not given")
	}
	for _, tc := range []struct {
		call int
		want Canceled
	}{{0, Canceled{}}, {2, Canceled{Pass: true, Index: 1}}, {CancelAll, Canceled{Pass: true, Index: CancelAll}}} {
		if got := w.Cancel(1, tc.call); fmt.Sprint(got) != fmt.Sprint(tc.want) {
			t.Errorf("cancel of call %d: %+v, want %+v", tc.call, got, tc.want)
		}
	}
	for call, want := range map[int]int{0: 1, 1: 2, 2: 3, -1: 3} {
		if got := w.Call(1, call); got != want {
			t.Errorf("call %d of the replica is %d, want %d", call, got, want)
		}
	}
	if got := w.Call(2, 7); got != 7 {
		t.Errorf("call 7 of a batch that did not wait is %d", got)
	}
}

// TestWaitsAnswerOnce plays random batches, cancels and answers, and checks that each call gets one
// answer, and that release is called once per batch.
func TestWaitsAnswerOnce(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 1))
		var w Waits
		answers := map[string]int{}
		released, ended := map[uint64]int{}, map[uint64]bool{}
		calls := map[uint64]int{}
		atReplica := map[uint64][]int{} // numbers of the replica that it has not answered
		left := map[uint64][]int{}      // as of the latest Left
		var waiting []uint64
		for step := range 60 {
			number := uint64(step)
			switch r.IntN(6) {
			case 0:
				calls[number] = 1 + r.IntN(3)
				w.Add(number, calls[number], func(err error) { ended[number] = err != nil })
				waiting = append(waiting, number)
			case 1, 2:
				b := uint64(r.IntN(step + 1))
				call := r.IntN(3)
				if r.IntN(4) == 0 {
					call = CancelAll
				}
				for _, i := range w.Cancel(b, call).Answer {
					answers[fmt.Sprint(b, "/", i)]++
				}
			case 3:
				if len(waiting) > 0 {
					b := waiting[r.IntN(len(waiting))]
					left[b] = w.Left(b)
				}
			case 4:
				if len(waiting) == 0 {
					break
				}
				b := waiting[r.IntN(len(waiting))]
				stale := fmt.Sprint(left[b]) != fmt.Sprint(w.Left(b))
				given := w.Give(b, left[b], func() { released[b]++ })
				if given == (stale || len(left[b]) == 0) {
					t.Fatalf("seed %d: batch %d is given: %v, with calls %v of %v", seed, b, given, left[b], w.Left(b))
				}
				if given {
					for i := range left[b] {
						atReplica[b] = append(atReplica[b], i)
					}
				} else if r.IntN(2) == 0 {
					continue
				} else {
					for _, i := range w.Refuse(b) {
						answers[fmt.Sprint(b, "/", i)]++
					}
					if got := w.Cancel(b, r.IntN(3)); got.Pass || got.Answer != nil {
						t.Errorf("seed %d: a cancel of a refused batch: %+v", seed, got)
					}
					w.Forget(b)
				}
				waiting = slices.DeleteFunc(waiting, func(n uint64) bool { return n == b })
			default:
				for _, b := range slices.Sorted(maps.Keys(atReplica)) {
					open := atReplica[b]
					if len(open) == 0 || r.IntN(2) == 0 {
						continue
					}
					k := r.IntN(len(open))
					answers[fmt.Sprint(b, "/", w.Answered(b, open[k]))]++
					atReplica[b] = slices.Delete(open, k, k+1)
					break
				}
			}
			if w.Waiting() != len(waiting) {
				t.Fatalf("seed %d: %d batches wait, want %d", seed, w.Waiting(), len(waiting))
			}
		}
		for _, b := range waiting {
			if open := w.Refuse(b); (len(open) == 0) != ended[b] {
				t.Errorf("seed %d: batch %d has calls %v, and its fetch was ended: %v", seed, b, open, ended[b])
			} else {
				for _, i := range open {
					answers[fmt.Sprint(b, "/", i)]++
				}
			}
		}
		for b, open := range atReplica {
			if want := min(len(open), 1); released[b] != 1-want {
				t.Errorf("seed %d: batch %d with %d open calls was released %d times", seed, b, len(open), released[b])
			}
			for _, at := range open {
				answers[fmt.Sprint(b, "/", w.Call(b, at))]++ // the core answers them when the replica is lost
			}
		}
		w.Close()
		for b := range atReplica {
			if released[b] != 1 {
				t.Errorf("seed %d: batch %d was released %d times in all", seed, b, released[b])
			}
		}
		for b, n := range calls {
			for i := range n {
				if got := answers[fmt.Sprint(b, "/", i)]; got != 1 {
					t.Errorf("seed %d: call %d of batch %d has %d answers", seed, i, b, got)
				}
			}
		}
	}
}

// TestWaitsEndsTheFetch checks that the fetch of a batch ends with its last call.
func TestWaitsEndsTheFetch(t *testing.T) {
	ctx, end := context.WithCancelCause(t.Context())
	var w Waits
	w.Add(1, 2, end)
	w.Cancel(1, 1)
	if ctx.Err() != nil {
		t.Error("it ends with the first call")
	}
	w.Cancel(1, CancelAll)
	if !errors.Is(context.Cause(ctx), ErrCanceled) {
		t.Errorf("after all calls: %v", context.Cause(ctx))
	}
}
