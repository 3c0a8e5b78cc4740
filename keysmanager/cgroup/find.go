package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/cgroups/v3"
)

// system names the files in which Linux describes its cgroups. Tests use their own files.
type system struct {
	cgroup    string // /proc/self/cgroup
	mountinfo string // /proc/self/mountinfo
}

var real = system{"/proc/self/cgroup", "/proc/self/mountinfo"}

// The controllers that groups use. In v2, cpu includes what cpuacct has in v1.
const (
	cpu     = "cpu"
	cpuacct = "cpuacct"
	memory  = "memory"
	pids    = "pids"
)

// place is where a hierarchy's groups are created: the folder of the cgroup that this process is
// in.
type place struct {
	mount string // where the hierarchy is mounted
	home  string // path of our cgroup below the mount; "/" if it is the mount itself
}

func (p place) dir() string { return filepath.Join(p.mount, p.home) }

// find returns the place of each available controller. unified reports that all of them are in the
// hierarchy of v2. A hybrid system mounts the controllers of v1 and a v2 hierarchy; find then
// returns those of v1 only.
func (s system) find() (places map[string]place, unified bool, err error) {
	f, err := os.Open(s.mountinfo)
	if err != nil {
		return nil, false, err
	}
	defer f.Close()
	mounts, err := parseMounts(f)
	if err != nil {
		return nil, false, fmt.Errorf("%s: %w", s.mountinfo, err)
	}
	g, err := os.Open(s.cgroup)
	if err != nil {
		return nil, false, err
	}
	defer g.Close()
	ours, oursUnified, err := cgroups.ParseCgroupFromReaderUnified(g)
	if err != nil {
		return nil, false, fmt.Errorf("%s: %w", s.cgroup, err)
	}
	places = map[string]place{}
	for _, m := range mounts {
		for _, c := range []string{cpu, cpuacct, memory, pids} {
			if p, ok := m.place(ours[c]); ok && !m.unified && slices.Contains(m.options, c) {
				places[c] = p
			}
		}
	}
	if len(places) > 0 {
		return places, false, nil
	}
	for _, m := range mounts {
		p, ok := m.place(oursUnified)
		if !m.unified || !ok {
			continue
		}
		if filepath.Base(p.home) == leaf { // an earlier process has moved this one there
			p.home = filepath.Dir(p.home)
		}
		b, err := os.ReadFile(filepath.Join(p.dir(), "cgroup.controllers"))
		if err != nil {
			return nil, true, err
		}
		for _, c := range strings.Fields(string(b)) {
			if c == cpu || c == memory || c == pids {
				places[c] = p
			}
		}
		return places, true, nil
	}
	return nil, false, errors.New("no cgroup file system is mounted where this process could see its own group")
}

// mount is a line of mountinfo about a cgroup file system.
type mount struct {
	root    string // the mounted part of the hierarchy
	point   string
	unified bool     // v2
	options []string // v1: its controllers and other options
}

// place returns where a group's folder is, if the mount shows it.
func (m mount) place(group string) (place, bool) {
	if group == "" {
		return place{}, false
	}
	rel, err := filepath.Rel(m.root, group)
	if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
		return place{}, false
	}
	return place{m.point, filepath.Join("/", rel)}, true
}

// parseMounts parses mountinfo (see proc_pid_mountinfo(5)). Of two mounts at the same place, the
// later line is the visible one.
func parseMounts(r io.Reader) ([]mount, error) {
	var all []mount
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20) // overlay mounts have long options
	for lines.Scan() {
		f := strings.Split(lines.Text(), " ")
		dash := slices.Index(f, "-") // after a number of optional fields
		if dash < 6 || len(f) < dash+4 || f[dash+1] != "cgroup" && f[dash+1] != "cgroup2" {
			continue
		}
		all = append(all, mount{root: unescape(f[3]), point: unescape(f[4]), unified: f[dash+1] == "cgroup2", options: strings.Split(f[dash+3], ",")})
	}
	return all, lines.Err()
}

var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace
