package image

import (
	"errors"
	"fmt"
	"sync"
	"testing"
)

// TestSharedLayerMadeAtTheSameTime has several builds or pulls make one layer. What the first has is
// not taken away from it by the others.
func TestSharedLayerMadeAtTheSameTime(t *testing.T) {
	t.Parallel()
	s := store(t, t.TempDir())
	const makers = 8
	errs := make([]error, makers)
	var together, done sync.WaitGroup
	together.Add(makers)
	for i := range makers {
		done.Go(func() {
			l, err := s.MakeLayer(t.Context(), fmt.Sprint(i), "words-1.0", func(dir string) error {
				put(t, dir, map[string]string{"words/__init__.py": "x = 1\n", "words/lib.so": library})
				together.Done()
				together.Wait() // so that no one finds another's layer before its own is made
				return nil
			})
			if err == nil {
				err = l.LinkInto(t.Context(), t.TempDir())
			}
			errs[i] = err
		})
	}
	done.Wait()
	if err := errors.Join(errs...); err != nil {
		t.Error(err)
	}
}
