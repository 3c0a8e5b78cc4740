package sim

import (
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/profile"
)

// maxProfile bounds the file of a profile, in bytes.
const maxProfile = 4 << 20

// readProfiles reads the profile files that stages name.
func (m *Model) readProfiles(open Opener, p *problems) {
	for i := range m.functions {
		v := &m.functions[i].Service
		if v.ProfileFile == "" {
			continue
		}
		path := m.functions[i].path + ".service.profileFile"
		if len(v.Profile) > 0 {
			p.add(path, "%q beside a profile, want one of them", v.ProfileFile)
			continue
		}
		if err := v.read(open); err != nil {
			p.add(path, "%v", err)
			v.ProfileFile = ""
			v.complete() // so that the rest can be checked
		}
	}
}

// read sets the profile from its file.
func (s *Service) read(open Opener) error {
	f, err := open(s.ProfileFile)
	if err != nil {
		return err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxProfile))
	if err != nil {
		return fmt.Errorf("%s: %w", s.ProfileFile, err)
	}
	measured, err := profile.Decode(text)
	if err != nil {
		return fmt.Errorf("%s: %w", s.ProfileFile, err)
	}
	var lengths []int
	for _, x := range measured.Plan() {
		if lengths = append(lengths, x.Length); x.Length == s.Length {
			s.Profile = append(s.Profile, Point{CPU: Milli(x.CPUMilli), Batch: x.Batch, Mean: x.Mean.Round(time.Nanosecond), CV: x.CV})
		}
	}
	if len(s.Profile) == 0 {
		slices.Sort(lengths)
		return fmt.Errorf("%s: no points with inputs of length %d, want service.length to be one of %v", s.ProfileFile, s.Length, slices.Compact(lengths))
	}
	s.complete()
	return nil
}
