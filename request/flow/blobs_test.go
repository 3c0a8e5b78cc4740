package flow

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/stagecoach-serving/stagecoach/request/task"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// double answers with its input twice, by reference as a dispatcher does.
func (r *rig) double(k *task.Task) *task.Reply {
	in, err := tensor.Resolve(r.store, k.Input[0].Items)
	if err != nil {
		return &task.Reply{Code: task.Failed, Message: err.Error()}
	}
	out, err := tensor.Externalise(r.store, k.Request, tensor.Activation{{ContentType: "x/y", Bytes: bytes.Repeat(in[0].Bytes, 2)}})
	if err != nil {
		return &task.Reply{Code: task.Unavailable, Message: err.Error()}
	}
	return &task.Reply{Output: out}
}

func TestLargeItemsGoByReference(t *testing.T) {
	r := newRig(t, graph(t, "a>b;b>c;c"), nil, nil)
	defer r.close()
	r.bus.work = r.double
	for _, size := range []int{10, tensor.InlineLimit - 1, tensor.InlineLimit + 1, 2 << 20} {
		resp, terr := r.Invoke(t.Context(), request("1", strings.Repeat("x", size)))
		if terr != nil {
			t.Fatal(terr)
		}
		it := resp.Output[0].Items[0]
		if len(it.Bytes) != 8*size || it.Ref != nil {
			t.Errorf("%d bytes came back as %d, reference %v, want %d", size, len(it.Bytes), it.Ref, 8*size)
		}
		r.empty()
	}
	if _, terr := r.Invoke(t.Context(), request("1", strings.Repeat("x", 65<<20))); terr == nil || terr.Status != http.StatusServiceUnavailable || !strings.Contains(terr.Cause, "full") {
		t.Errorf("more than the store takes: %+v, want 503", terr)
	}
}

func TestLateBlobsAreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r := newRig(t, graph(t, "a>b,c;b;c"), nil, nil)
		defer r.close()
		r.bus.work = func(k *task.Task) *task.Reply {
			switch k.Stage {
			case "b":
				// Ends the request while c runs.
				return &task.Reply{Code: task.Failed, Message: "broken"}
			case "c":
				<-release
				out, err := tensor.Externalise(r.store, k.Request, texts(strings.Repeat("late", tensor.InlineLimit)))
				if err != nil {
					t.Error(err)
				}
				return &task.Reply{Output: out}
			}
			return add(k)
		}
		if _, terr := r.Invoke(t.Context(), request("1", "x")); terr == nil || terr.Cause != "broken" {
			t.Errorf("got %+v", terr)
		}
		close(release)
		r.bus.workers.Wait()
		r.empty()
	})
}

// TestBlobsOfAnAttemptGivenUpAreDropped checks an attempt that answers by reference after it was
// given up. Its blobs are dropped, and the request's response has no references.
func TestBlobsOfAnAttemptGivenUpAreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, graph(t, "a"), nil, nil)
		defer r.close()
		r.bus.work = func(k *task.Task) *task.Reply {
			if k.Attempt == 1 {
				return &task.Reply{Code: task.ReplicaLost, Replica: "a-1", Message: "killed"}
			}
			out, err := tensor.Externalise(r.store, k.Request, texts(strings.Repeat("late", tensor.InlineLimit)))
			if err != nil {
				t.Error(err)
			}
			first := k.Key
			first.Attempt = 1
			r.bus.reply(&task.Reply{Key: first, Output: out})
			return add(k)
		}
		if _, terr := r.Invoke(t.Context(), request("1", "x")); terr != nil {
			t.Errorf("got %+v", terr)
		}
		r.empty()
	})
}

func TestManySmallItemsGoByReferenceTooOrAreRefused(t *testing.T) {
	var inline, refs int
	r := newRig(t, graph(t, "a>b;b"), nil, nil)
	defer r.close()
	r.bus.work = func(k *task.Task) *task.Reply {
		if k.Stage == "b" {
			for _, it := range k.Input[0].Items {
				if it.Ref != nil {
					refs++
				} else {
					inline++
				}
			}
			return &task.Reply{}
		}
		if string(k.Input[0].Items[0].Bytes) == "medium" {
			out := make(tensor.Activation, 100) // inline, which dispatchers never send
			for i := range out {
				out[i] = tensor.Item{Bytes: make([]byte, 60<<10)}
			}
			return &task.Reply{Output: out}
		}
		return &task.Reply{Output: make(tensor.Activation, 3_000_000)}
	}
	if _, terr := r.Invoke(t.Context(), request("1", "medium")); terr != nil || inline == 0 || refs < 80 {
		t.Errorf("%d items inline, %d by reference, %+v", inline, refs, terr)
	}
	if left, err := os.ReadDir(r.blobs); err != nil || len(left) > 0 {
		t.Errorf("blobs are left: %v, %v", left, err)
	}
	if _, terr := r.Invoke(t.Context(), request("2", "tiny")); terr == nil || terr.Status != http.StatusBadRequest || !strings.Contains(terr.Cause, "want at most") {
		t.Errorf("three million items: %+v, want 400", terr)
	}
}

// TestLengthOfLargeItemsIsMeasured measures tensors that travel by reference: of a request, and of
// the output of a stage. A blob that cannot be read ends the request.
func TestLengthOfLargeItemsIsMeasured(t *testing.T) {
	const n = 3 * tensor.InlineLimit
	for name, c := range map[string]struct {
		input tensor.Activation
		gone  bool
		want  string
	}{
		"of a request":         {tensor.Activation{ids(n)}, false, "a 196608, b 196608"},
		"of an output":         {texts("x"), false, "a 0, b 196608"},
		"of a lost blob":       {texts("x"), true, "a 0"},
		"of several items":     {tensor.Activation{ids(5), ids(n)}, false, "a 196608, b 196608"},
		"of an unknown tensor": {texts("wrong"), false, "a 0"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, annotated(t, graph(t, "a>b;b"), map[string]string{"a.length": "tensor:input_ids:1"}), nil, nil)
			defer r.close()
			lengths := make(chan string, 10)
			r.bus.work = func(k *task.Task) *task.Reply {
				lengths <- fmt.Sprintf("%s %d", k.Stage, k.Length)
				out := tensor.Activation{ids(n)}
				if k.Stage == "a" && string(k.Input[0].Items[0].Bytes) == "wrong" {
					out[0].Tensors[1].Name = "other"
				}
				out, err := tensor.Externalise(r.store, k.Request, out)
				if err != nil {
					return &task.Reply{Code: task.Failed, Message: err.Error()}
				}
				if c.gone {
					out[0].Ref.Blob = "gone"
				}
				return &task.Reply{Replica: "r1", Output: out}
			}
			resp, terr := r.Invoke(t.Context(), task.Request{ID: "1", Target: "p.ns", Input: c.input})
			close(lengths)
			got := strings.Join(slices.Collect(func(yield func(string) bool) {
				for s := range lengths {
					if !yield(s) {
						return
					}
				}
			}), ", ")
			if got != c.want || (resp == nil) == strings.Contains(c.want, "b ") {
				t.Errorf("lengths %q, %+v, want %q", got, terr, c.want)
			}
			switch {
			case c.gone && (terr == nil || terr.Status != http.StatusServiceUnavailable || !strings.Contains(terr.Cause, "the length of its output: item 0: blob")):
				t.Errorf("%+v, want 503 that names the blob", terr)
			case !c.gone && resp == nil && (terr.Status != http.StatusBadRequest || !strings.Contains(terr.Cause, `tensor "other" of shape [1 196608]`)):
				t.Errorf("%+v, want 400 with the shapes", terr)
			}
		})
	}
}
