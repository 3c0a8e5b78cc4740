package study

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"
)

// Store keeps finished runs in a file, so that a study that was interrupted goes on where it was. A
// run is found again if all that it depends on is the same: the program, the setting, the contender
// with its configuration, and the seed. Recorded loads are not checked: if a trace changes, delete
// the file.
type Store struct {
	version string
	mu      sync.Mutex
	runs    map[string]run
	found   int
	file    File
}

// stored is a line of a store's file.
type stored struct {
	Key string `json:"key"`
	Run run    `json:"run"`
}

// File is where a [Store] keeps runs, such as an *os.File that is open for reading and writing.
type File interface {
	io.ReadWriteSeeker
	Truncate(size int64) error
}

// NewStore reads the runs of a file. version stands for the program: with another one, no run is
// found again. A last line that is incomplete, because the program was killed while it wrote it, is
// removed. Only one program may have the file open. The caller closes the file.
func NewStore(f File, version string) (*Store, error) {
	s := &Store{version: version, runs: map[string]run{}, file: f}
	whole, err := s.read()
	if err == nil {
		err = f.Truncate(whole)
	}
	if err == nil {
		_, err = f.Seek(whole, io.SeekStart)
	}
	return s, err
}

// read reads all complete lines, and returns their length in bytes.
func (s *Store) read() (whole int64, err error) {
	r := bufio.NewReader(s.file)
	for n := 1; ; n++ {
		line, err := r.ReadBytes('\n')
		if errors.Is(err, io.EOF) {
			return whole, nil
		}
		if err != nil {
			return whole, err
		}
		var x stored
		d := json.NewDecoder(bytes.NewReader(line))
		d.DisallowUnknownFields()
		if err := d.Decode(&x); err != nil || x.Key == "" || x.Run.Seconds <= 0 {
			return whole, fmt.Errorf("line %d: %.80q, want a run; delete the file to begin anew (%w)", n, line, err)
		}
		s.runs[x.Key] = x.Run
		whole += int64(len(line))
	}
}

// Found returns how many runs were found in the file, and were not made again.
func (s *Store) Found() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.found
}

// get returns a run that was made before.
func (s *Store) get(key string) (run, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.runs[key]
	if ok {
		s.found++
	}
	return r, ok
}

// put adds a run to the file.
func (s *Store) put(key string, r run) error {
	line, err := json.Marshal(stored{key, r})
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.runs[key] = r
	_, err = s.file.Write(append(line, '\n'))
	return err
}

// key returns what identifies a run of a cell.
func (s *Study) key(c *cell, seed uint64) (string, error) {
	x := c.setting.Scenario(c.train) // a quick look has settings of the same names, but shorter
	text, err := json.Marshal(struct {
		Version, Study, Setting string
		Train                   bool
		Warmup, Duration        time.Duration
		Contender               string
		Knobs                   []float64
		Seed                    uint64
		Multiples               []float64
	}{s.Store.version, s.Name, c.setting.Name, c.train, x.Warmup, x.Duration, c.contender.Name, c.knobs, seed, s.Multiples})
	return fmt.Sprintf("%x", sha256.Sum256(text)), err
}
