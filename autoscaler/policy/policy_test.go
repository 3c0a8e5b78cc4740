package policy

import (
	"strings"
	"testing"
)

// TestNamesThatAreGoneSayWhatToUse chooses policies by names of an earlier version.
func TestNamesThatAreGoneSayWhatToUse(t *testing.T) {
	for _, name := range []string{"quart-attention", "quart-persistence", "quart-qna"} {
		_, err := Names{Corrector: name}.Choose()
		if err == nil || !strings.Contains(err.Error(), `corrector "`+name+`" is no more, want "quart"`) {
			t.Errorf("corrector %q: %v, want the name to use in its place", name, err)
		}
	}
}
