package image

import (
	"errors"
	"fmt"
	"sync"
	"testing"
)

// TestSharedLayerMadeAtTheSameTime runs several builds or pulls that make one layer. The first
// one's layer stays while the others finish.
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
				together.Wait() // so that each makes its layer before it finds another's
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
