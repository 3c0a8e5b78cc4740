package wire

import (
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

func TestMemoryErrorNamesDevices(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		message, text string
		devices       []string
	}{
		{"layer 3: want 2 GiB", "layer 3: want 2 GiB", nil},
		{"on GPU-5f1c-2a: want 2 GiB", "on GPU-5f1c-2a: want 2 GiB", []string{"GPU-5f1c-2a"}},
		{"place: " + OutOfMemoryOn + "GPU-2,GPU-1: want 2 GiB", OutOfMemoryOn + "GPU-2,GPU-1: want 2 GiB", []string{"GPU-1", "GPU-2"}},
		{OutOfMemoryOn + "MIG-5f: GPU-", OutOfMemoryOn + "MIG-5f: GPU-", []string{"MIG-5f"}},
		{OutOfMemoryOn + "MIG-GPU-5f/1/0: want 2 GiB on MIG-GPU-5f/1/0", OutOfMemoryOn + "MIG-GPU-5f/1/0: want 2 GiB on MIG-GPU-5f/1/0", []string{"MIG-GPU-5f/1/0"}},
	} {
		got := NewMemoryError(tc.message)
		if got.Text != tc.text || !slices.Equal(got.Devices, tc.devices) {
			t.Errorf("%q: got %+v, want %q on %q", tc.message, got, tc.text, tc.devices)
		}
	}
	if got := NewMemoryError(OutOfMemoryOn + strings.Repeat("é", 1000)); len(got.Text) > maxMemoryText || !strings.HasSuffix(got.Text, "é") {
		t.Errorf("a long message: got %d bytes that end with %q, want at most %d and whole characters", len(got.Text), got.Text[len(got.Text)-2:], maxMemoryText)
	}
}

func TestMemoryErrorInNeedsTheMark(t *testing.T) {
	t.Parallel()
	if got := MemoryErrorIn("RuntimeError: out of memory: GPU-1"); got != (*task.MemoryError)(nil) {
		t.Errorf("got %+v, want none", got)
	}
	if got := MemoryErrorIn("place: " + OutOfMemoryOn + "GPU-1: want 2 GiB"); got == nil || !slices.Equal(got.Devices, []string{"GPU-1"}) {
		t.Errorf("got %+v, want a lack of memory on GPU-1", got)
	}
}
