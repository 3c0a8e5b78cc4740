package image

import (
	"os"
	"slices"
	"testing"
	"time"
)

// TestUsedDigestsAreThoseOfAllControlPlanes checks that the notes of two control planes are joined,
// that old notes do not count, and that collection keeps notes.
func TestUsedDigestsAreThoseOfAllControlPlanes(t *testing.T) {
	s := store(t, t.TempDir())
	if got, known, err := Used(s, time.Hour); known || err != nil {
		t.Errorf("without notes: %q, %t, %v, want nothing known", got, known, err)
	}
	for _, note := range []struct {
		controlPlane string
		digests      []string
	}{{"up-1", []string{"a", "b"}}, {"up-1", []string{"b"}}, {"up-2", []string{"c"}}} {
		if err := NoteUsed(t.Context(), s, note.controlPlane, note.digests); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := s.Collect(t.Context(), nil, -time.Minute); err != nil {
		t.Fatal(err)
	}
	if got, known, err := Used(s, time.Hour); !known || err != nil || !slices.Equal(slices.Sorted(slices.Values(got)), []string{"b", "c"}) {
		t.Errorf("%q, %t, %v, want b and c", got, known, err)
	}
	old := time.Now().Add(-2 * time.Hour)
	if err := os.Chtimes(s.path("used", "up-2"), old, old); err != nil {
		t.Fatal(err)
	}
	if got, known, err := Used(s, time.Hour); !known || err != nil || !slices.Equal(got, []string{"b"}) {
		t.Errorf("%q, %t, %v, want b alone", got, known, err)
	}
	if err := NoteUsed(t.Context(), s, "../up", nil); err == nil {
		t.Error("a note outside of its folder is accepted")
	}
}
