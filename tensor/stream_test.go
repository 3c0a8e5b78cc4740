package tensor

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

// TestStreamedPiecesMakeTheWholeItem checks that pieces make the same item as the whole.
func TestStreamedPiecesMakeTheWholeItem(t *testing.T) {
	t.Parallel()
	d, err := OpenDir(t.TempDir(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct{ contentType, body string }{
		"some": {"image/png", strings.Repeat("abc", 1000)}, "none": {"", ""}, "one": {"text/plain", "a"},
	} {
		ref, err := d.Stream("r", tc.contentType, iotest.HalfReader(strings.NewReader(tc.body)))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		a, err := Resolve(d, Activation{{Ref: &ref}})
		if want, _ := ItemsFromHTTP(tc.contentType, []byte(tc.body)); err != nil || string(a[0].Bytes) != tc.body || a[0].ContentType != want[0].ContentType {
			t.Errorf("%s: %v %d bytes, %v", name, a[0].ContentType, len(a[0].Bytes), err)
		}
	}
	if err := d.Drop("r"); err != nil || d.used != 0 {
		t.Errorf("%d bytes in use after all is dropped, %v", d.used, err)
	}
}

// TestFailedStreamLeavesNothing checks that a failed stream leaves nothing behind.
func TestFailedStreamLeavesNothing(t *testing.T) {
	t.Parallel()
	d, err := OpenDir(t.TempDir(), 100<<10)
	if err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	if _, err := d.Stream("r", "", io.MultiReader(strings.NewReader("abc"), iotest.ErrReader(broken))); !errors.Is(err, broken) {
		t.Errorf("%v", err)
	}
	if _, err := d.Stream("r", "", bytes.NewReader(make([]byte, 101<<10))); !errors.Is(err, ErrFull) {
		t.Errorf("%v, want it full", err)
	}
	drops := readerFunc(func(b []byte) (int, error) { return 1, d.Drop("r") })
	if _, err := d.Stream("r", "", drops); !errors.Is(err, ErrDropped) {
		t.Errorf("%v, want it dropped", err)
	}
	if len(d.owners) != 0 || d.used != 0 {
		t.Errorf("%d owners, %d bytes in use", len(d.owners), d.used)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }
