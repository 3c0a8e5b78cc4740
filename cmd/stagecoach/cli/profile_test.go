package cli

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// TestRoundsFitTheLine: a round has as many batches in a row as the function's line has room for,
// and at least one.
func TestRoundsFitTheLine(t *testing.T) {
	for _, tc := range []struct{ size, largest, queue, want int }{
		{4, 4, 1000, 2 + 8*4}, {256, 256, 1000, 2 + 3*256}, {4, 4, 5, 2 + 4}, {2, 4, 1000, 2 + 2}, {1, 4, 1000, 1}, {1, 1, 3, 2 + 3},
	} {
		m := meter{slots: 2, largest: tc.largest, queue: tc.queue}
		if got := m.calls(tc.size); got != tc.want {
			t.Errorf("%d calls for batches of %d of %d at most, %d of which may wait; want %d", got, tc.size, tc.largest, tc.queue, tc.want)
		}
	}
}

// TestCallsOfAProfileHaveItems: a call has the header X-Items, and says what the gateway answers.
func TestCallsOfAProfileHaveItems(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, fmt.Sprintf("header X-Items: got %q", r.Header.Get("X-Items")), http.StatusBadRequest)
	}))
	defer s.Close()
	m := meter{c: client.New(s.URL), url: "/function/first", items: "sent"}
	if _, err := m.call(t.Context(), probe{contentType: "application/json", body: []byte(`["a","b"]`)}); err == nil || !strings.Contains(err.Error(), `header X-Items: got "sent"`) {
		t.Errorf("a call: %v, want it to have the header", err)
	}
}

func TestSizesAreDoubledUpToTheLargest(t *testing.T) {
	for largest, want := range map[int][]int{0: {1}, 1: {1}, 2: {1, 2}, 6: {1, 2, 4, 6}, 32: {1, 2, 4, 8, 16, 32}} {
		if got := sizesUpTo(largest); !slices.Equal(got, want) {
			t.Errorf("up to %d: %v, want %v", largest, got, want)
		}
	}
}
