package sandbox

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// PSS returns the sum of the proportional set sizes of processes, in bytes. A page that several of
// them share counts once in all.
func PSS(pids ...int) (int64, error) {
	sum := int64(0)
	for _, pid := range pids {
		n, err := pss(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
		if err != nil {
			return 0, err
		}
		sum += n
	}
	return sum, nil
}

func pss(file string) (int64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
			var kb int64
			_, err := fmt.Sscan(rest, &kb)
			return kb << 10, err
		}
	}
	return 0, fmt.Errorf("%s: has no Pss line", file)
}

// Meter measures the usage of groups of processes. The zero value is ready to use. Its methods are
// safe for concurrent use.
type Meter struct {
	mu   sync.Mutex
	last map[string]map[int]sample // by group and process
}

// sample is what a process and its descendants have used up to a time.
type sample struct {
	start uint64 // start time of the process, which distinguishes it from a later process with its pid
	at    time.Time
	cpu   time.Duration
	rate  float64 // thousandths of a core, at the latest measurement
}

// window is the minimum time between two measurements of the processor, because the kernel counts
// in steps of 10 ms.
const window = time.Second

// Measure returns the usage of these processes and all their descendants. cpuMilli is in
// thousandths of a core. It is the mean since the group's previous measurement, or since the
// processes started. It is measured at most once a second; a call in between returns the previous
// value again. memory is in bytes, as [PSS] counts them. Processes that have ended count as 0.
func (m *Meter) Measure(group string, pids []int) (cpuMilli float64, memory int64, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := map[int]sample{}
	for _, pid := range pids {
		s, bytes, err := measure(pid)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, os.ErrProcessDone) {
			continue
		}
		if err != nil {
			return 0, 0, err
		}
		if old, ok := m.last[group][pid]; ok && old.start == s.start {
			if s.at.Sub(old.at) < window {
				s = old
			} else {
				s.rate = max(0, 1000*(s.cpu-old.cpu).Seconds()/s.at.Sub(old.at).Seconds())
			}
		}
		now[pid] = s
		cpuMilli += s.rate
		memory += bytes
	}
	if m.last == nil {
		m.last = map[string]map[int]sample{}
	}
	if m.last[group] = now; len(now) == 0 {
		delete(m.last, group)
	}
	return cpuMilli, memory, nil
}

// Forget drops the samples of a group.
func (m *Meter) Forget(group string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.last, group)
}

// measure samples the tree of one process. The rate is the mean since the process started.
func measure(pid int) (s sample, memory int64, err error) {
	st, err := readStat(pid)
	if err != nil {
		return sample{}, 0, err
	}
	up, err := uptime()
	if err != nil {
		return sample{}, 0, err
	}
	s = sample{start: st.start, at: time.Now()}
	for _, p := range family(pid) {
		if one, err := readStat(p); err == nil { // else it has ended meanwhile
			s.cpu += one.cpu
		}
		if n, err := PSS(p); err == nil {
			memory += n
		}
	}
	if life := up - time.Duration(st.start)*tick; life > 0 {
		s.rate = 1000 * s.cpu.Seconds() / max(life, tick).Seconds()
	}
	return s, memory, nil
}

// Tree returns what a process and all its descendants have: memory in bytes, as [PSS] counts it,
// and the time for which they have used processors.
func Tree(pid int) (memory int64, cpu time.Duration, err error) {
	s, memory, err := measure(pid)
	return memory, s.cpu, err
}

// tick is the kernel's unit of time in /proc. It is the same on every Linux that Go supports.
const tick = time.Second / 100

// stat is a part of /proc/PID/stat.
type stat struct {
	start uint64        // ticks between the machine's start and the process's
	cpu   time.Duration // of the process, and of the children that it has waited for
}

func readStat(pid int) (stat, error) {
	file := fmt.Sprintf("/proc/%d/stat", pid)
	b, err := os.ReadFile(file)
	if err != nil {
		return stat{}, err
	}
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:])) // from the third field on
	if len(f) < 20 {
		return stat{}, fmt.Errorf("%s: %d fields after the name, want 20", file, len(f))
	}
	if f[0] == "Z" || f[0] == "X" {
		return stat{}, os.ErrProcessDone
	}
	var s stat
	for _, i := range []int{11, 12, 13, 14} { // utime, stime, cutime, cstime
		n, err := strconv.ParseInt(f[i], 10, 64)
		if err != nil {
			return stat{}, fmt.Errorf("%s: %w", file, err)
		}
		s.cpu += time.Duration(n) * tick
	}
	if s.start, err = strconv.ParseUint(f[19], 10, 64); err != nil {
		return stat{}, fmt.Errorf("%s: %w", file, err)
	}
	return s, nil
}

// uptime returns the time since the machine started.
func uptime() (time.Duration, error) {
	b, err := os.ReadFile("/proc/uptime")
	if err != nil {
		return 0, err
	}
	var seconds float64
	if _, err := fmt.Sscan(string(b), &seconds); err != nil {
		return 0, fmt.Errorf("/proc/uptime: %w", err)
	}
	return time.Duration(seconds * float64(time.Second)), nil
}

// maxFamily bounds the number of processes per family.
const maxFamily = 1000

// family returns a process and its descendants, as far as the kernel lists them.
func family(pid int) []int {
	all := []int{pid}
	for i := 0; i < len(all) && len(all) < maxFamily; i++ {
		// The pattern is valid.
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", all[i]))
		for _, file := range files {
			b, _ := os.ReadFile(file) // the thread may have ended
			for f := range strings.FieldsSeq(string(b)) {
				if child, err := strconv.Atoi(f); err == nil {
					all = append(all, child)
				}
			}
		}
	}
	return all
}
