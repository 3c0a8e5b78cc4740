package wire

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// ofNode is a reference to an item that node a keeps.
func ofNode(blob string, size int64) tensor.Item {
	return tensor.Item{Ref: &tensor.Ref{Owner: "r", Blob: blob, Size: size, Keeper: tensor.Keeper{Node: "a", Address: "h:1", Sum: 1 << 63}}}
}

func bytesItem(size int) tensor.Item {
	return tensor.Item{ContentType: "x/y", Bytes: bytes.Repeat([]byte{7}, size)}
}

// TestFlagsOfFrames checks that flags for daemons pass a connection.
func TestFlagsOfFrames(t *testing.T) {
	a, b := pair(t)
	tx, rx := NewConn(NewSocket(a)), NewConn(NewSocket(b))
	for _, f := range []Frame{{Type: FrameBatch, Keep: true}, {Type: FrameBatch, Kept: true}, {Type: FrameBatch, Keep: true, Kept: true}, {Type: FrameBatch}} {
		if err := tx.Write(f); err != nil {
			t.Fatal(err)
		}
		if got, err := rx.Read(); err != nil || !reflect.DeepEqual(got, f) {
			t.Errorf("got %+v, %v, want %+v", got, err, f)
		}
	}
}

// TestReferencesStay checks which references Attach and Detach leave as they are.
func TestReferencesStay(t *testing.T) {
	in := tensor.Activation{ofNode("x", 100<<10), bytesItem(100 << 10)}
	out, files, err := Attach(in, 0, func(tensor.Ref) (*os.File, error) { return nil, nil })
	defer closeAll(files)
	if err != nil || len(files) != 1 || out[0].Ref.Blob != "x" || out[1].Ref.Blob != "0" {
		t.Fatalf("%+v, %d files, %v", out, len(files), err)
	}
	round, err := tensor.DecodeActivation(tensor.AppendActivation(nil, out))
	if err != nil || !reflect.DeepEqual(round, out) {
		t.Errorf("decoded as %+v, %v", round, err)
	}
	if _, err := Detach(append(tensor.Activation(nil), out...), files); err == nil || !strings.Contains(err.Error(), `reference to "x" of "r"`) {
		t.Errorf("from a replica: %v", err)
	}
	got, err := DetachKept(out, files)
	if err != nil || got[0].Ref == nil || !reflect.DeepEqual(got[1], in[1]) {
		t.Errorf("from a daemon: %v", err)
	}
}

// TestKeepFiles keeps some of an output's files, and checks that the others can still be read.
func TestKeepFiles(t *testing.T) {
	out := tensor.Activation{bytesItem(70 << 10), bytesItem(10), bytesItem(80 << 10), bytesItem(90 << 10)}
	items, files, err := Attach(out, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	f := Frame{Type: FrameResult, Batch: 3, Payload: Result{Index: 1, Service: 5, Output: items}.Append(nil), Files: files}
	changed, err := KeepFiles(&f, func(item *os.File, size int64) (tensor.Ref, bool) {
		return *ofNode(fmt.Sprint("kept-", size>>10), size).Ref, size > 85<<10 || size < 75<<10
	})
	defer closeAll(f.Files)
	if err != nil || !changed || !f.Kept || len(f.Files) != 1 {
		t.Fatalf("changed %v, kept %v, %d files, %v", changed, f.Kept, len(f.Files), err)
	}
	m, err := DecodeResult(f.Payload)
	if err != nil || m.Index != 1 || m.Service != 5 {
		t.Fatalf("%+v, %v", m, err)
	}
	got, err := DetachKept(m.Output, f.Files)
	if err != nil || got[0].Ref.Blob != "kept-70" || got[3].Ref.Blob != "kept-90" || !reflect.DeepEqual(got[1:3], out[1:3]) {
		t.Errorf("%+v, %v", got, err)
	}
	if err := files[0].Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("a file that was taken out: %v, want it closed", err)
	}

	none := Frame{Type: FrameResult, Payload: Result{Output: tensor.Activation{{Ref: fileRef(0, 1)}}}.Append(nil), Files: f.Files}
	if changed, err := KeepFiles(&none, func(*os.File, int64) (tensor.Ref, bool) { return tensor.Ref{}, false }); changed || err != nil || none.Kept {
		t.Errorf("nothing kept: changed %v, %v", changed, err)
	}
	twice := Result{Output: tensor.Activation{{Ref: fileRef(0, 1)}, {Ref: fileRef(0, 1)}}}.Append(nil)
	for what, payload := range map[string][]byte{"one file twice": twice, "a file that is not there": Result{Output: tensor.Activation{{Ref: fileRef(1, 1)}}}.Append(nil), "no result": {0xff}, "an item of a node": f.Payload} {
		bad := Frame{Type: FrameResult, Payload: payload, Files: f.Files}
		if _, err := KeepFiles(&bad, func(*os.File, int64) (tensor.Ref, bool) { return *ofNode("x", 1).Ref, true }); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
}

// TestFetched checks that items of nodes become files behind those of the batch, and how a batch is
// refused if some are lost.
func TestFetched(t *testing.T) {
	own, err := sealed([]byte("own"))
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	batch := func() Batch {
		return Batch{Calls: []Call{
			{Key: task.Key{Request: "r", Task: 1, Attempt: 1}, Deadline: time.Unix(9, 0), Input: tensor.Input{{From: "p", Items: tensor.Activation{{Ref: fileRef(0, 3)}, ofNode("x", 5)}}}},
			{Key: task.Key{Request: "q", Task: 2, Attempt: 1}, Input: tensor.Input{{Items: tensor.Activation{bytesItem(3)}}, {From: "z", Items: tensor.Activation{ofNode("y", 6), ofNode("z", 7)}}}},
			{Key: task.Key{Request: "s", Task: 3, Attempt: 1}},
		}}
	}
	if got, want := Owners(batch())[:2], []Owner{{"r", time.Unix(9, 0)}, {Request: "q"}}; !reflect.DeepEqual(got, want) {
		t.Errorf("owners %+v", got)
	}
	open := func(ref tensor.Ref) (*os.File, error) {
		f, err := sealed([]byte(ref.Blob))
		if err != nil {
			t.Error(err)
		}
		return f, err
	}
	fetched := func(b Batch, get func(tensor.Ref) (*os.File, error), calls ...int) (Frame, error) {
		t.Helper()
		copied, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", own.Fd()), os.O_RDONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		all := FetchBatch(b, []*os.File{copied}, get)
		t.Cleanup(all.Close)
		return all.Frame(7, calls)
	}
	f, err := fetched(batch(), open, 0, 1, 2)
	if err != nil || f.Batch != 7 || f.Kept || len(f.Files) != 4 {
		t.Fatalf("%+v, %v", f, err)
	}
	text := ""
	for _, file := range f.Files {
		text += string(content(t, file)) + " "
	}
	b, err := DecodeBatch(f.Payload)
	second := b.Calls[1].Input[1].Items
	if text != "own x y z " || err != nil || *second[0].Ref != *fileRef(2, 6) || *second[1].Ref != *fileRef(3, 7) {
		t.Errorf("files %q, %v, second call %+v", text, err, second)
	}
	f, failed := fetched(batch(), open, 1, 2) // the first call was canceled, and its file with it
	if b, err = DecodeBatch(f.Payload); failed != nil || err != nil || len(b.Calls) != 2 || len(f.Files) != 2 || b.Calls[0].Key.Request != "q" ||
		*b.Calls[0].Input[1].Items[0].Ref != *fileRef(0, 6) || string(content(t, f.Files[0])) != "y" {
		t.Errorf("without the first call: %+v, %d files, %v", b, len(f.Files), err)
	}
	f, failed = fetched(batch(), open, 0)
	if b, err = DecodeBatch(f.Payload); failed != nil || err != nil || len(b.Calls) != 1 || len(f.Files) != 2 || string(content(t, f.Files[0])) != "own" || string(content(t, f.Files[1])) != "x" {
		t.Errorf("only the first call: %+v, %d files, %v", b, len(f.Files), err)
	}

	only := func(ref tensor.Ref) (*os.File, error) {
		if ref.Blob == "x" {
			return open(ref)
		}
		return nil, errors.New("gone")
	}
	if f, err = fetched(batch(), only, 0, 2); err != nil || len(f.Files) != 2 {
		t.Errorf("only a canceled call's items are lost: %v", err)
	}
	_, err = fetched(batch(), only, 0, 1, 2)
	refused := func(call int, why error) Error {
		t.Helper()
		m, err := DecodeError(Refusal(call, why).Append(nil))
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	var got []Error
	for call := range 3 {
		got = append(got, refused(call, errors.Join(err, nil)))
	}
	if m := got[1]; m.Code != task.InputLost || !reflect.DeepEqual(m.Lost, []string{"y", "z"}) || m.Index != 1 || !m.OfDaemon() ||
		m.Message != `item y of 6 bytes, which node "a" keeps, is lost: gone; so are 1 more` {
		t.Errorf("the call with lost items: %+v", m)
	}
	for _, m := range []Error{got[0], got[2]} {
		if m.Code != task.InputLost || m.Lost != nil || !strings.Contains(m.Message, "another call of its batch could not be sent: item y") {
			t.Errorf("another call: %+v", m)
		}
	}
	for want, why := range map[task.Code]error{task.Canceled: errors.Join(err, ErrCanceled), task.Unavailable: errors.New("other")} {
		if m := refused(1, why); m.Code != want {
			t.Errorf("%v: %+v, want code %d", why, m, want)
		}
	}
	many := Batch{Calls: []Call{{Input: tensor.Input{{Items: make(tensor.Activation, MaxFiles)}}}}}
	for i := range many.Calls[0].Input[0].Items {
		many.Calls[0].Input[0].Items[i] = ofNode("x", 1)
	}
	if _, err := fetched(many, nil, 0); err == nil || !strings.Contains(err.Error(), "want at most 64 in all") {
		t.Errorf("too many files: %v", err)
	}
}

// TestItemsAreFetchedOnce has two calls that need the same item.
func TestItemsAreFetchedOnce(t *testing.T) {
	call := func(request string) Call {
		return Call{Key: task.Key{Request: request, Task: 1, Attempt: 1}, Input: tensor.Input{{Items: tensor.Activation{ofNode("x", 5)}}}}
	}
	fetches := 0
	all := FetchBatch(Batch{Calls: []Call{call("r"), call("s")}}, nil, func(tensor.Ref) (*os.File, error) {
		fetches++
		return sealed([]byte("x"))
	})
	defer all.Close()
	f, err := all.Frame(7, []int{0, 1})
	if err != nil || fetches != 1 || len(f.Files) != 2 || string(content(t, f.Files[0])) != "x" || string(content(t, f.Files[1])) != "x" {
		t.Errorf("%d fetches, %d files, %v; want the file of one fetch twice", fetches, len(f.Files), err)
	}
}

// TestRelayEdits checks what passes a relay that changes some frames and takes others, whatever is
// before them.
func TestRelayEdits(t *testing.T) {
	dispatcher, far := streams(t, 1<<20)
	a, b := pair(t)
	near, replica := NewOutlet(NewSocket(a)), NewSocket(b)
	edit := func(f *Frame) (Edited, error) {
		switch {
		case f.Type == FrameCancel:
			return Taken, nil
		case f.Type == FrameResult && len(f.Files) > 0:
			f.Payload = append([]byte("changed "), f.Payload...)
			return Changed, nil
		case f.Type == FrameBatch && f.Keep:
			f.Keep = false
			return Changed, nil
		case f.Type == FrameDrain:
			return Unchanged, errors.New("enough")
		}
		return Unchanged, nil
	}
	ended := make(chan error, 1)
	go func() { ended <- Relay(near, far, edit) }()
	file, err := sealed([]byte("in a file"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	one := []*os.File{file}
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		tx := NewConn(dispatcher)
		for _, f := range []Frame{
			{Type: FrameBatch, Batch: 1, Payload: []byte("plain"), Files: one},
			{Type: FrameCancel, Batch: 1},
			{Type: FrameBatch, Batch: 2, Keep: true},
			{Type: FrameBatch, Batch: 3, Payload: []byte("plain"), Files: one},
			{Type: FrameResult, Batch: 4, Payload: []byte("x"), Files: one},
			{Type: FrameResult, Batch: 5}, // the rest comes at once
			{Type: FrameBatch, Batch: 6, Keep: true},
			{Type: FrameResult, Batch: 7},
			{Type: FrameCancel, Batch: 7},
			{Type: FrameResult, Batch: 8},
			{Type: FrameDrain},
		} {
			if err := tx.Gather(f); err != nil {
				t.Error(err)
			}
		}
		if err := tx.Flush(); err != nil {
			t.Error(err)
		}
	})
	rx := NewConn(replica)
	_ = rx.SetReadDeadline(time.Now().Add(time.Minute))
	for _, want := range []string{"Batch 1 plain 1", "Batch 2  0", "Batch 3 plain 1", "Result 4 changed x 1", "Result 5  0", "Batch 6  0", "Result 7  0", "Result 8  0"} {
		f, err := rx.Read()
		if got := fmt.Sprintf("%v %d %s %d", f.Type, f.Batch, f.Payload, len(f.Files)); err != nil || got != want || f.Keep {
			t.Fatalf("got %q, %v, want %q", got, err, want)
		}
		for _, file := range f.Files {
			if got := content(t, file); string(got) != "in a file" {
				t.Errorf("%s: its file has %q", want, got)
			}
		}
		closeAll(f.Files)
	}
	if err := <-ended; err == nil || !strings.Contains(err.Error(), "enough") {
		t.Errorf("an edit's error: %v", err)
	}
}
