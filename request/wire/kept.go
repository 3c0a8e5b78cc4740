package wire

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/internal/pack"
	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// AtNode is the Socket of a replica on a node whose daemon keeps items, see Frame.Keep.
type AtNode struct {
	Socket
	Node    string
	Address string // host:port where the daemon's tunnel listens
}

// Owner is the request of a call whose large outputs may stay on the node, and when they are not
// needed any more at the latest; zero: unknown.
type Owner struct {
	Request  string
	Deadline time.Time
}

// Owners returns the owners of a Batch's outputs, by call.
func Owners(b Batch) []Owner {
	out := make([]Owner, len(b.Calls))
	for i, c := range b.Calls {
		out[i] = Owner{c.Key.Request, c.Deadline}
	}
	return out
}

// AnswerIndex returns which call of its batch the payload of a Result or Error answers.
func AnswerIndex(payload []byte) (int, error) {
	r := pack.NewReader(payload)
	i := small(r)
	return i, r.Err()
}

// KeepFiles replaces the files of a Result by references to the items in them. keep is called for
// each; without a reference, the file stays. KeepFiles reports whether it has changed the frame.
func KeepFiles(f *Frame, keep func(item *os.File, size int64) (tensor.Ref, bool)) (bool, error) {
	m, err := DecodeResult(f.Payload)
	if err != nil {
		return false, err
	}
	gone := make([]bool, len(f.Files))
	changed := false
	for i := range m.Output {
		ref := m.Output[i].Ref
		if ref == nil {
			continue
		}
		k, ok := fileIndex(*ref, len(f.Files))
		if !ok || gone[k] {
			return false, fmt.Errorf("item %d: a reference to %q of %q, want one of %d files, once", i, ref.Blob, ref.Owner, len(f.Files))
		}
		if at, ok := keep(f.Files[k], ref.Size); ok {
			m.Output[i].Ref, gone[k], changed = &at, true, true
		}
	}
	if !changed {
		return false, nil
	}
	var left []*os.File
	to := make([]int, len(f.Files))
	for k, file := range f.Files {
		if gone[k] {
			_ = file.Close() // opened for reading only
			continue
		}
		to[k] = len(left)
		left = append(left, file)
	}
	for i := range m.Output {
		if ref := m.Output[i].Ref; ref != nil && ref.Node == "" {
			k, _ := fileIndex(*ref, len(f.Files)) // as above
			m.Output[i].Ref = fileRef(to[k], ref.Size)
		}
	}
	f.Payload, f.Files, f.Kept = m.Append(nil), left, true
	return true, nil
}

// LostError means that items of a batch's input are lost.
type LostError []LostItem

// LostItem is a lost item.
type LostItem struct {
	Call int // that needs it
	Ref  tensor.Ref
	Err  error
}

// Error names the node and the item.
func (l LostItem) Error() string {
	return fmt.Sprintf("item %s of %d bytes, which node %q keeps, is lost: %v", l.Ref.Blob, l.Ref.Size, l.Ref.Node, l.Err)
}

// Error names the first item, and its node.
func (e LostError) Error() string {
	if more := len(e) - 1; more > 0 {
		return fmt.Sprintf("%v; so are %d more", e[0], more)
	}
	return e[0].Error()
}

// of returns the lost items of a call.
func (e LostError) of(call int) (out LostError) {
	for _, l := range e {
		if l.Call == call {
			out = append(out, l)
		}
	}
	return out
}

// keptItem is a reference in a batch, and the call that needs the item.
type keptItem struct {
	call int
	at   *tensor.Item
}

// keptItems returns the references of a batch to items that nodes keep.
func keptItems(b Batch) (out []keptItem) {
	for i := range b.Calls {
		for _, p := range b.Calls[i].Input {
			for k := range p.Items {
				if ref := p.Items[k].Ref; ref != nil && ref.Node != "" {
					out = append(out, keptItem{i, &p.Items[k]})
				}
			}
		}
	}
	return out
}

// Fetched returns the frame of a batch with files in place of references to items that nodes keep.
// files are those of the batch's own frame. open gets the items, up to 8 at a time. If one cannot
// be got, Fetched returns a [LostError]. The caller closes the files of the frame, and after an
// error its own.
func Fetched(number uint64, b Batch, files []*os.File, open func(tensor.Ref) (*os.File, error)) (Frame, error) {
	items := keptItems(b)
	if len(files)+len(items) > MaxFiles {
		return Frame{}, fmt.Errorf("%d files and %d items of nodes in one batch, want at most %d in all", len(files), len(items), MaxFiles)
	}
	got := make([]*os.File, len(items))
	errs := make([]error, len(items))
	room, done := make(chan struct{}, 8), make(chan struct{})
	for i, it := range items {
		room <- struct{}{}
		go func() {
			got[i], errs[i] = open(*it.at.Ref)
			<-room
			done <- struct{}{}
		}()
	}
	for range items {
		<-done
	}
	var lost LostError
	for i, err := range errs {
		if err != nil {
			lost = append(lost, LostItem{items[i].call, *items[i].at.Ref, err})
		}
	}
	if lost != nil {
		closeAll(slices.DeleteFunc(got, func(f *os.File) bool { return f == nil }))
		return Frame{}, lost
	}
	for i, it := range items {
		it.at.Ref = fileRef(len(files)+i, it.at.Ref.Size)
	}
	return Frame{Type: FrameBatch, Batch: number, Payload: b.Append(nil), Files: append(slices.Clip(files), got...)}, nil
}

// ErrCanceled means that nobody waits for a batch any more.
var ErrCanceled = errors.New("nobody waits for the batch any more")

// Refusals returns the payloads of Errors for a batch that cannot be given to its replica. The
// calls whose items are lost fail with that. The other calls fail with [task.InputLost] without
// items. After ErrCanceled, all of them are canceled.
func Refusals(b Batch, err error) [][]byte {
	var lost LostError
	errors.As(err, &lost)
	out := make([][]byte, len(b.Calls))
	for i := range b.Calls {
		m := Error{Index: i, Code: task.Unavailable, Message: err.Error()}
		if errors.Is(err, ErrCanceled) {
			m.Code = task.Canceled
		} else if mine := lost.of(i); mine != nil {
			m.Code, m.Message = task.InputLost, mine.Error()
			for _, l := range mine {
				m.Lost = append(m.Lost, l.Ref.Blob)
			}
		} else if lost != nil {
			m.Code, m.Message = task.InputLost, "another call of its batch could not be sent: "+err.Error()
		}
		out[i] = m.Append(nil)
	}
	return out
}
