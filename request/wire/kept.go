package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
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

// AnswerIndex returns the number of the call that the payload of a Result, an Error or a Chunk is
// about.
func AnswerIndex(payload []byte) (int, error) {
	r := pack.NewReader(payload)
	i := small(r)
	return i, r.Err()
}

// WithIndex returns a copy of a payload as in [AnswerIndex], with another number of the call.
func WithIndex(payload []byte, call int) []byte {
	_, n := binary.Uvarint(payload)
	return append(pack.Uint(nil, uint64(call)), payload[max(n, 0):]...)
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

// FetchTime bounds how long a batch waits for its items. The control plane cancels calls at their
// limits.
const FetchTime = 5 * time.Minute

// fetchesAtOnce is how many items of a batch are fetched at the same time.
const fetchesAtOnce = 8

// Fetch fetches items with get, up to 8 at the same time. For each item, it returns an error, or a
// file that the caller closes.
func Fetch(refs []tensor.Ref, get func(tensor.Ref) (*os.File, error)) (files []*os.File, errs []error) {
	files, errs = make([]*os.File, len(refs)), make([]error, len(refs))
	room := make(chan struct{}, fetchesAtOnce)
	var all sync.WaitGroup
	for i, ref := range refs {
		room <- struct{}{}
		all.Go(func() {
			files[i], errs[i] = get(ref)
			<-room
		})
	}
	all.Wait()
	return files, errs
}

// Fetched is a batch whose items of nodes were fetched.
type Fetched struct {
	batch Batch
	files []*os.File // of the batch's own frame
	items []keptItem
	at    map[tensor.Ref]int // indexes in got and errs
	got   []*os.File         // nil: the item is lost
	errs  []error
	err   error // of the whole batch
}

// FetchBatch fetches the items of a batch that nodes keep. files are the files of the batch's
// frame. The caller closes the result.
func FetchBatch(b Batch, files []*os.File, get func(tensor.Ref) (*os.File, error)) *Fetched {
	f := &Fetched{batch: b, files: files, items: keptItems(b)}
	if n := len(f.items); len(files)+n > MaxFiles {
		f.err = fmt.Errorf("%d files and %d items of nodes in one batch, want at most %d in all", len(files), n, MaxFiles)
		return f
	}
	refs := KeptRefs(b)
	f.at = make(map[tensor.Ref]int, len(refs))
	for i, ref := range refs {
		f.at[ref] = i
	}
	f.got, f.errs = Fetch(refs, get)
	return f
}

// KeptRefs returns the references of a batch to items that nodes keep, each item once.
func KeptRefs(b Batch) (refs []tensor.Ref) {
	known := map[tensor.Ref]bool{}
	for _, it := range keptItems(b) {
		if ref := *it.at.Ref; !known[ref] {
			known[ref] = true
			refs = append(refs, ref)
		}
	}
	return refs
}

// Close closes all files, including those of the frame that Frame has returned.
func (f *Fetched) Close() {
	closeAll(f.files)
	closeAll(slices.DeleteFunc(f.got, func(file *os.File) bool { return file == nil }))
}

// Frame returns the frame of some calls of the batch, with files in place of references to items
// that nodes keep. If one of their items is lost, Frame returns a [LostError]. Frame may be called
// once.
func (f *Fetched) Frame(number uint64, calls []int) (Frame, error) {
	if f.err != nil {
		return Frame{}, f.err
	}
	var lost LostError
	out := Batch{Calls: make([]Call, len(calls))}
	for k, call := range calls {
		out.Calls[k] = f.batch.Calls[call]
	}
	var files []*os.File
	for k := range out.Calls {
		for _, p := range out.Calls[k].Input {
			for i := range p.Items {
				if own, ok := f.own(p.Items[i].Ref); ok {
					p.Items[i].Ref = fileRef(len(files), p.Items[i].Ref.Size)
					files = append(files, own)
				}
			}
		}
	}
	for _, it := range f.items {
		if !slices.Contains(calls, it.call) {
			continue
		}
		i := f.at[*it.at.Ref]
		if f.errs[i] != nil {
			lost = append(lost, LostItem{it.call, *it.at.Ref, f.errs[i]})
			continue
		}
		it.at.Ref = fileRef(len(files), it.at.Ref.Size)
		files = append(files, f.got[i])
	}
	if lost != nil {
		return Frame{}, lost
	}
	return Frame{Type: FrameBatch, Batch: number, Payload: out.Append(nil), Files: files}, nil
}

// own returns a file of the batch's own frame.
func (f *Fetched) own(ref *tensor.Ref) (*os.File, bool) {
	if ref == nil || ref.Node != "" {
		return nil, false
	}
	k, ok := fileIndex(*ref, len(f.files))
	if !ok {
		return nil, false
	}
	return f.files[k], true
}

// ErrCanceled means that nobody waits for a batch any more.
var ErrCanceled = errors.New("nobody waits for the batch any more")

// Refusal returns the answer to a call of a batch that cannot be given to its replica. If items of
// the call are lost, the answer names them. If only other calls' items are lost, the answer is
// [task.InputLost] without items. After [ErrCanceled], the call is canceled.
func Refusal(call int, err error) Error {
	m := Error{Index: call, Code: task.Unavailable, Message: err.Error()}
	var lost LostError
	if errors.Is(err, ErrCanceled) {
		m.Code = task.Canceled
	} else if errors.As(err, &lost) {
		m.Code, m.Message = task.InputLost, "another call of its batch could not be sent: "+err.Error()
		if mine := lost.of(call); mine != nil {
			m.Message = mine.Error()
			for _, l := range mine {
				m.Lost = append(m.Lost, l.Ref.Blob)
			}
		}
	}
	return m
}
