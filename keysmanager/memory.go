package keysmanager

import (
	"bytes"
	"cmp"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// meter reads what memory there is and what processes take of it. Sizes are in bytes.
type meter interface {
	// bounds returns the machine's and the cgroup's memory; used is without what the kernel can give back, as far as that is a file's.
	bounds() []bound
	// resident returns what a process has in memory: of its own, and of files.
	resident(pid int) (anonymous, files int64)
	// exact returns the proportional set size of a process. It takes some 12 ms for each gigabyte.
	exact(pid int) (int64, error)
}

// kernel is the meter of this machine.
type kernel struct {
	root   string // where /proc and /sys are; empty: at the root
	page   int64
	groups []string // folders of the cgroups around this process, innermost first
}

// newKernel looks where this process is. That stays so: who moves a process to another cgroup does it before it has much memory.
func newKernel(root string) kernel {
	k := kernel{root: root, page: int64(os.Getpagesize())}
	k.groups = groupFolders(string(k.read("proc/self/cgroup")), string(k.read("proc/self/mountinfo")))
	return k
}

func (k kernel) read(path ...string) []byte {
	b, _ := os.ReadFile(filepath.Join(append([]string{k.root, "/"}, path...)...)) // what cannot be read bounds nothing
	return b
}

func (k kernel) bounds() []bound {
	var all []bound
	info := k.read("proc/meminfo")
	total, known := field(info, "MemTotal:")
	available, ok := field(info, "MemAvailable:")
	if known && ok {
		all = append(all, bound{boundMachine, total << 10, (total - available) << 10})
	}
	// Each cgroup around this process bounds it. The tightest one counts.
	var inner *bound
	for _, dir := range k.groups {
		if b, ok := k.group(dir); ok && (inner == nil || b.below(Threshold) < inner.below(Threshold)) {
			inner = &b
		}
	}
	if inner != nil {
		all = append(all, *inner)
	}
	return all
}

// group reads a cgroup's limit and use; false: it has none.
func (k kernel) group(dir string) (bound, bool) {
	limit, usage, files := "memory.max", "memory.current", [2]string{"active_file", "inactive_file"}
	if k.read(dir, limit) == nil { // version 1
		limit, usage, files = "memory.limit_in_bytes", "memory.usage_in_bytes", [2]string{"total_active_file", "total_inactive_file"}
	}
	total, err := strconv.ParseInt(strings.TrimSpace(string(k.read(dir, limit))), 10, 64)
	if err != nil || total >= 1<<60 { // "max", or version 1's word for it
		return bound{}, false
	}
	used, err := strconv.ParseInt(strings.TrimSpace(string(k.read(dir, usage))), 10, 64)
	if err != nil {
		return bound{}, false
	}
	stat := k.read(dir, "memory.stat")
	for _, name := range files {
		n, _ := field(stat, name)
		used -= n
	}
	return bound{boundCgroup, total, max(used, 0)}, true
}

func (k kernel) resident(pid int) (anonymous, files int64) {
	f := strings.Fields(string(k.read("proc", strconv.Itoa(pid), "statm")))
	if len(f) < 3 {
		return 0, 0 // it has ended
	}
	all, _ := strconv.ParseInt(f[1], 10, 64)
	shared, _ := strconv.ParseInt(f[2], 10, 64)
	return (all - shared) * k.page, shared * k.page
}

func (k kernel) exact(pid int) (int64, error) { return sandbox.PSS(pid) }

// field finds the number that follows a name at the start of a line.
func field(text []byte, name string) (int64, bool) {
	for line := range bytes.Lines(text) {
		if rest, ok := bytes.CutPrefix(line, []byte(name)); ok && len(rest) > 0 && (rest[0] == ' ' || rest[0] == '\t') {
			n, err := strconv.ParseInt(string(bytes.Fields(rest)[0]), 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

// groupFolders returns the folders of the cgroups that bound the memory of a process, innermost first: its own and those around
// it, of version 1 and 2, as its /proc/self/cgroup and mountinfo say.
func groupFolders(cgroup, mountinfo string) []string {
	var out []string
	for line := range strings.Lines(cgroup) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 {
			continue
		}
		kind := "cgroup"
		if parts[1] == "" {
			kind = "cgroup2"
		} else if !hasWord(parts[1], "memory") {
			continue
		}
		for mount := range strings.Lines(mountinfo) {
			root, at, ok := cgroupMount(mount, kind)
			if !ok {
				continue
			}
			rel, err := filepath.Rel(root, parts[2])
			if err != nil || rel == ".." || strings.HasPrefix(rel, "../") {
				rel = "." // what is mounted is not above the process's: the mount is all that is seen of it
			}
			for range 64 { // deeper than anybody nests
				out = append(out, filepath.Join(at, rel))
				if rel == "." {
					break
				}
				rel = filepath.Dir(rel)
			}
			break
		}
	}
	return out
}

// cgroupMount takes a line of mountinfo apart when it is the mount of a kind of cgroup, of version 1 the memory controller's.
func cgroupMount(line, kind string) (root, at string, ok bool) {
	before, after, found := strings.Cut(strings.TrimSuffix(line, "\n"), " - ")
	f, tail := strings.Fields(before), strings.Fields(after)
	if !found || len(f) < 5 || len(tail) < 3 || tail[0] != kind || kind == "cgroup" && !hasWord(tail[2], "memory") {
		return "", "", false
	}
	return f[3], f[4], true
}

// hasWord says whether a list by commas has a word.
func hasWord(list, word string) bool {
	for w := range strings.SplitSeq(list, ",") {
		if w == word {
			return true
		}
	}
	return false
}

// Bounds of how often memory is looked at.
const (
	sampleEvery = 500 * time.Millisecond // by the watcher
	sampleFresh = 100 * time.Millisecond // a sample that is not older is not taken again
	exactShare  = 100                    // exact measurements take at most one part in so many of the time
)

// sample is what memory looked like at some time.
type sample struct {
	at     time.Time
	bounds []bound
	own    int64  // by this node's zygotes and replicas
	epoch  uint64 // Manager.epoch, of what was counted
}

// family is a zygote with its replicas as they are counted.
type family struct {
	of       *zygote // nil: none
	replicas []copied
	// Bytes: as it seems, and if the replicas have changed all that they were forked with.
	seems, most int64
}

// copied is a replica as it is counted.
type copied struct {
	pid   int
	bytes int64 // of its own, as its cgroup says; -1: it has none
}

// families returns what runs, with m.mu held, by the process of a load that is under way what that is expected to take, and the
// processes of zygotes that are being ended.
func (m *Manager) families() (all []family, coming map[int]int64, going []int) {
	byZygote, coming := map[*zygote]int{}, map[int]int64{}
	for _, s := range m.slots.Values() {
		switch {
		case s.zygote != nil:
			byZygote[s.zygote] = len(all)
			all = append(all, family{of: s.zygote, replicas: s.zygote.spares()})
		case s.pid != 0:
			coming[s.pid] = s.need.bytes
		}
	}
	var alone family
	for _, p := range m.processes {
		if !p.running || p.zygote.works() { // a worker's replicas are counted with it
			continue
		}
		c := copied{p.pid, -1}
		if u := p.group.info(); u != nil {
			c.bytes = u.Memory
		}
		of := p.zygote
		if of == nil {
			of = p.mapped
		}
		if i, ok := byZygote[of]; ok && of != nil {
			all[i].replicas = append(all[i].replicas, c)
		} else if of == nil {
			alone.replicas = append(alone.replicas, c)
		}
	}
	for z := range m.going {
		going = append(going, z.pid)
	}
	return append(all, alone), coming, going
}

// weigh samples the memory, unless that was done a moment ago. It must be called without m.mu.
func (m *Manager) weigh(fresh time.Duration) sample {
	m.sampling.Lock()
	defer m.sampling.Unlock()
	if time.Since(m.sample.at) < fresh {
		return m.sample
	}
	m.mu.Lock()
	all, coming, going := m.families()
	s := sample{epoch: m.epoch}
	m.mu.Unlock()
	mt := m.cfg.meter
	s.bounds = mt.bounds()
	var mapped, most int64
	for i := range all {
		mapped += all[i].weigh(mt)
		s.own += all[i].seems
		most += all[i].most
	}
	if m.cfg.Memory > 0 && bound.below(bound{total: m.cfg.Memory, used: most}, calmBelow) < 0 {
		s.own += m.beyond(all)
	}
	twice := int64(0) // what leaves, and what is counted as coming already
	for _, pid := range going {
		own, _ := mt.resident(pid)
		twice += own
	}
	for pid, bytes := range coming {
		own, _ := mt.resident(pid)
		twice += min(own, bytes)
	}
	for i := range s.bounds {
		s.bounds[i].used += mapped - twice
	}
	if m.cfg.Memory > 0 {
		s.bounds = append([]bound{{boundOwn, m.cfg.Memory, s.own}}, s.bounds...)
	}
	s.at = time.Now()
	m.sample = s
	return s
}

// lockWeighed locks m.mu and returns a sample that counts the zygotes that there are now.
func (m *Manager) lockWeighed(fresh time.Duration) sample {
	for tries := 0; ; tries++ {
		s := m.weigh(fresh)
		m.mu.Lock()
		if s.epoch == m.epoch || tries == maxWeighed {
			return s
		}
		m.mu.Unlock()
		fresh = 0
	}
}

// maxWeighed bounds how often memory is measured again because zygotes come and go meanwhile.
const maxWeighed = 10

// weigh says what a family takes, and returns how much of it are pages of a file that its zygote alone maps.
func (f *family) weigh(mt meter) (mapped int64) {
	var anonymous, files int64
	if f.of != nil {
		f.seems = f.of.bytes
		if f.of.pid != 0 {
			anonymous, files = mt.resident(f.of.pid)
			if f.of.works() { // it has grown by its replicas' parameters
				f.seems = max(f.seems, anonymous+files-f.of.shared)
			}
			mapped = min(files, max(0, f.seems-anonymous)) // the rest is libraries, which all share
		}
	}
	f.most = f.seems
	for _, r := range f.replicas {
		if r.bytes >= 0 {
			f.seems += r.bytes
			f.most += r.bytes
			continue
		}
		own, _ := mt.resident(r.pid)
		f.seems += max(0, own-anonymous) // what a fork has not changed is its zygote's
		f.most += own                    // unless it has changed all of it, which only an exact look tells
	}
	return mapped
}

// beyond returns how much more families take than it seems, as an exact look tells, or told when the latest was too recent for what
// it takes.
func (m *Manager) beyond(all []family) (bytes int64) {
	if begin := time.Now(); !begin.Before(m.exact.next) {
		m.exact.beyond = map[*zygote]int64{}
		for _, f := range all {
			if f.most > f.seems {
				m.exact.beyond[f.of] = max(0, f.exactly(m.cfg.meter)-f.seems)
			}
		}
		m.exact.next = time.Now().Add(exactShare * time.Since(begin))
	}
	for _, f := range all {
		bytes += min(m.exact.beyond[f.of], f.most-f.seems) // of replicas that have ended meanwhile nothing
	}
	return bytes
}

// exactly measures a zygote's family; 0: it cannot be done.
func (f *family) exactly(mt meter) int64 {
	n, changed := int64(0), int64(0)
	for _, r := range append([]copied{{f.of.pid, -1}}, f.replicas...) { // the zygote has its part of what it shares with them
		if r.bytes >= 0 {
			changed += r.bytes
			continue
		}
		one, err := mt.exact(r.pid)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return 0
		}
		n += one
	}
	return max(n, f.of.bytes) + changed // what has given way of a file is read in again
}

// memory is the sample as eviction sees it, with m.mu held.
func (m *Manager) memory(s sample) memory {
	out := memory{bounds: s.bounds, pressed: m.pressed, short: time.Now().Before(m.calm)}
	for _, k := range m.slots.Keys() {
		if s, _ := m.slots.Peek(k); s.loading != nil {
			out.coming += s.need.bytes
		}
	}
	return out
}

// watchMemory evicts as soon as memory is short, until ctx ends.
func (m *Manager) watchMemory() {
	t := time.NewTicker(cmp.Or(m.cfg.sampleEvery, sampleEvery))
	defer t.Stop()
	for {
		select {
		case <-m.ctx.Done():
			return
		case <-t.C:
			m.tidy()
			m.parkAhead()
		}
	}
}
