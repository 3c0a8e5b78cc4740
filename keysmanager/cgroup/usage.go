package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Usage is read here, because the library reads twenty files per group for its statistics, and
// still lacks some of these numbers.

// counter is a number in a group's file: the named field, or the only number if field is empty.
type counter struct{ controller, file, field string }

// usageFiles says where the numbers of a Usage are.
type usageFiles struct {
	cpu, memory, file, throttled, periods, throttledIn, kills, refused counter

	cpuUnit, throttledUnit time.Duration
}

var (
	filesV1 = usageFiles{
		cpu:         counter{cpuacct, "cpuacct.usage", ""},
		throttled:   counter{cpu, "cpu.stat", "throttled_time"},
		periods:     counter{cpu, "cpu.stat", "nr_periods"},
		throttledIn: counter{cpu, "cpu.stat", "nr_throttled"},
		memory:      counter{memory, "memory.usage_in_bytes", ""},
		file:        counter{memory, "memory.stat", "total_inactive_file"},
		kills:       counter{memory, "memory.oom_control", "oom_kill"},
		refused:     counter{pids, "pids.events", "max"},
		cpuUnit:     time.Nanosecond, throttledUnit: time.Nanosecond,
	}
	filesV2 = usageFiles{
		cpu:         counter{cpu, "cpu.stat", "usage_usec"},
		throttled:   counter{cpu, "cpu.stat", "throttled_usec"},
		periods:     counter{cpu, "cpu.stat", "nr_periods"},
		throttledIn: counter{cpu, "cpu.stat", "nr_throttled"},
		memory:      counter{memory, "memory.current", ""},
		file:        counter{memory, "memory.stat", "inactive_file"},
		kills:       counter{memory, "memory.events", "oom_kill"},
		refused:     counter{pids, "pids.events", "max"},
		cpuUnit:     time.Microsecond, throttledUnit: time.Microsecond,
	}
)

// usage reads the group's files. A number is 0 if its controller is missing or if the kernel does
// not count it.
func (g *Group) usage() (Usage, error) {
	files := filesV1
	if g.root.unified {
		files = filesV2
	}
	r := reader{group: g, files: map[string]string{}}
	u := Usage{
		CPU:         time.Duration(r.read(files.cpu)) * files.cpuUnit,
		Throttled:   time.Duration(r.read(files.throttled)) * files.throttledUnit,
		Periods:     r.read(files.periods),
		ThrottledIn: r.read(files.throttledIn),
		Memory:      max(0, int64(r.read(files.memory))-int64(r.read(files.file))),
		OOMKills:    r.read(files.kills), ForksRefused: r.read(files.refused),
	}
	if len(r.errs) > 0 {
		return Usage{}, fmt.Errorf("cgroup %s: %w", g.name, errors.Join(r.errs...))
	}
	return u, nil
}

// reader reads each of a group's files once.
type reader struct {
	group *Group
	files map[string]string
	errs  []error
}

func (r *reader) read(c counter) uint64 {
	if _, ok := r.group.root.places[c.controller]; !ok {
		return 0
	}
	text, ok := r.files[c.file]
	if !ok {
		dir := filepath.Join(r.group.root.folder(c.controller), r.group.path)
		b, err := os.ReadFile(filepath.Join(dir, c.file))
		if errors.Is(err, fs.ErrNotExist) {
			if _, gone := os.Stat(dir); gone == nil {
				err = nil // an older kernel
			}
		}
		if err != nil {
			r.errs = append(r.errs, err)
		}
		text = string(b)
		r.files[c.file] = text
	}
	n, err := number(text, c.field)
	if err != nil {
		r.errs = append(r.errs, fmt.Errorf("%s: %w", c.file, err))
	}
	return n
}

// number returns a field of a file with lines NAME NUMBER. Without a field, it returns the file's
// only number. A missing field is 0.
func number(text, field string) (uint64, error) {
	if field == "" {
		if text = strings.TrimSpace(text); text == "" {
			return 0, nil
		}
		return strconv.ParseUint(text, 10, 64)
	}
	for line := range strings.Lines(text) {
		if name, rest, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name == field {
			return strconv.ParseUint(rest, 10, 64)
		}
	}
	return 0, nil
}
