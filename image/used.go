package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"time"
)

var noteForm = regexp.MustCompile(`^[a-zA-Z0-9-]+$`)

// NoteUsed notes in a store which digests the functions of a control plane use, for [Used].
// controlPlane is a name that no other control plane with this store has.
func NoteUsed(ctx context.Context, s *Store, controlPlane string, digests []string) error {
	if !noteForm.MatchString(controlPlane) {
		return fmt.Errorf("image store: note of %q, want letters, digits and dashes", controlPlane)
	}
	release, err := s.use(ctx) // collection removes unfinished files, too
	if err != nil {
		return err
	}
	defer release()
	b, err := json.Marshal(digests)
	if err == nil {
		err = os.MkdirAll(s.path("used"), 0o700)
	}
	if err == nil {
		err = s.replace(filepath.Join("used", controlPlane), b)
	}
	return s.explain("list of used images", err)
}

// Used returns the digests that functions of all control planes use which share the store. Notes
// older than age do not count. known is false if there is no younger note.
func Used(s *Store, age time.Duration) (digests []string, known bool, err error) {
	entries, err := os.ReadDir(s.path("used"))
	if errors.Is(err, os.ErrNotExist) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, fmt.Errorf("image store: %w", err)
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || time.Since(info.ModTime()) > age {
			continue // err: it is being replaced
		}
		b, err := os.ReadFile(s.path("used", e.Name()))
		if err != nil {
			return nil, false, fmt.Errorf("image store: %w", err)
		}
		var more []string
		if err := json.Unmarshal(b, &more); err != nil {
			return nil, false, fmt.Errorf("image store: %s: %w", s.path("used", e.Name()), err)
		}
		digests, known = append(digests, more...), true
	}
	return digests, known, nil
}
