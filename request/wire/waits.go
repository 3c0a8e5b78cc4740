package wire

import "context"

// Waits tracks the batches of one replica that wait until their items are fetched from nodes. If a
// call is canceled meanwhile, the caller answers it at once, and the replica gets the batch without
// it. So the calls that follow it have lower numbers at the replica, and Waits translates these
// numbers. Each call gets one answer: either Cancel or Refuse returns the call, and the caller
// answers it, or the replica answers it.
//
// The zero value is ready for use. A Waits is not safe for concurrent use.
type Waits struct {
	waiting map[uint64]*waiting // by batch
	given   map[uint64]*given   // by batch: the batches that the replica got after a wait
}

// waiting is a batch whose items are on their way.
type waiting struct {
	end      context.CancelCauseFunc // of the fetch
	canceled []bool                  // by call
	left     int                     // calls that were not canceled
}

// given is a batch that the replica got after a wait.
type given struct {
	calls   []int // the calls, by their number at the replica
	all     int   // calls of the batch, including canceled ones
	left    int   // calls without an answer
	release func()
}

// Canceled says what the caller does with a cancel.
type Canceled struct {
	Answer []int // calls to be answered with [ErrCanceled] now
	Pass   bool  // the replica gets the cancel, for the call Index
	Index  int
}

// Add adds a batch. When all of its calls are canceled, end is called with [ErrCanceled].
func (w *Waits) Add(batch uint64, calls int, end context.CancelCauseFunc) {
	if w.waiting == nil {
		w.waiting, w.given = map[uint64]*waiting{}, map[uint64]*given{}
	}
	w.waiting[batch] = &waiting{end: end, canceled: make([]bool, calls), left: calls}
}

// Waiting returns how many batches wait.
func (w *Waits) Waiting() int { return len(w.waiting) }

// Cancel cancels a call of a batch, or all of them with [CancelAll].
func (w *Waits) Cancel(batch uint64, call int) Canceled {
	b := w.waiting[batch]
	if b == nil {
		return w.pass(batch, call)
	}
	var out Canceled
	for i := range b.canceled {
		if (i == call || call == CancelAll) && !b.canceled[i] {
			b.canceled[i] = true
			b.left--
			out.Answer = append(out.Answer, i)
		}
	}
	if b.left == 0 {
		b.end(ErrCanceled)
	}
	return out
}

// pass returns the cancel for a batch that does not wait, with the replica's number of the call.
func (w *Waits) pass(batch uint64, call int) Canceled {
	b := w.given[batch]
	if b == nil || call == CancelAll {
		return Canceled{Pass: true, Index: call}
	}
	for at, i := range b.calls {
		if i == call {
			return Canceled{Pass: true, Index: at}
		}
	}
	return Canceled{} // the call was canceled before
}

// Left returns the calls of a waiting batch that were not canceled.
func (w *Waits) Left(batch uint64) []int {
	b := w.waiting[batch]
	out := make([]int, 0, b.left)
	for i, canceled := range b.canceled {
		if !canceled {
			out = append(out, i)
		}
	}
	return out
}

// Give ends the wait of a batch: the replica gets it now, with these calls. Give returns false if a
// call was canceled since [Waits.Left], or if calls is empty. release is called when the replica
// has answered all calls, or by Close.
func (w *Waits) Give(batch uint64, calls []int, release func()) bool {
	b := w.waiting[batch]
	if len(calls) == 0 || b.left != len(calls) {
		return false
	}
	delete(w.waiting, batch)
	w.given[batch] = &given{calls: calls, all: len(b.canceled), left: len(calls), release: release}
	return true
}

// Refuse returns the calls of a waiting batch that have no answer yet. The caller answers them,
// because the replica does not get the batch, and then calls [Waits.Forget].
func (w *Waits) Refuse(batch uint64) []int {
	calls := w.Left(batch)
	b := w.waiting[batch]
	b.left = 0
	for i := range b.canceled {
		b.canceled[i] = true // they get no second answer
	}
	return calls
}

// Forget ends the wait of a batch that was refused. Until then, the replica gets no cancels of it.
func (w *Waits) Forget(batch uint64) { delete(w.waiting, batch) }

// Call returns the number that a call has in the batch, from its number at the replica. If the
// replica has no such call, the result is the number of calls of the batch, which is invalid, too.
func (w *Waits) Call(batch uint64, call int) int {
	b := w.given[batch]
	switch {
	case b == nil:
		return call
	case call < 0 || call >= len(b.calls):
		return b.all
	}
	return b.calls[call]
}

// Answered translates a number as Call does, and counts the answer to the call.
func (w *Waits) Answered(batch uint64, call int) int {
	b := w.given[batch]
	if b == nil {
		return call
	}
	call = w.Call(batch, call)
	if b.left--; b.left == 0 {
		delete(w.given, batch)
		b.release()
	}
	return call
}

// Close calls release for each batch that the replica has not answered. The caller calls Close when
// the replica has ended and no batch waits.
func (w *Waits) Close() {
	for _, b := range w.given {
		b.release()
	}
	w.given = nil
}
