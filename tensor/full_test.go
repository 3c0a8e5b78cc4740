package tensor_test

import (
	"bytes"
	"errors"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/internal/disk"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// TestFullDiskIsAFullStore checks that storing an item on a full disk gives the error of a full
// store, with the disk's name, and leaves no file.
func TestFullDiskIsAFullStore(t *testing.T) {
	small := proctest.Disk(t, "4m")
	d, err := tensor.OpenDir(filepath.Join(small, "blobs"), 1<<30)
	if err != nil {
		t.Fatal(err)
	}
	large := make([]byte, 8<<20)
	_, put := d.Put("put", large)
	_, stream := d.Stream("stream", "", bytes.NewReader(large))
	for name, err := range map[string]error{"put": put, "stream": stream} {
		if !errors.Is(err, tensor.ErrFull) || !disk.IsFull(err) || !strings.Contains(err.Error(), "the disk of "+small) {
			t.Errorf("%s: %v, want ErrFull and the disk", name, err)
		}
		if err := d.Drop(name); err != nil {
			t.Error(err)
		}
	}
	if _, err := d.Put("small", large[:1<<20]); err != nil {
		t.Errorf("the disk is still full: %v", err)
	}
}
