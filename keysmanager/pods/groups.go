package pods

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/internal/kube"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// GroupsConfig configures Groups.
type GroupsConfig struct {
	Cluster    *kube.Client
	Namespaces []string // as in Config
	Named      Named
	Cores      int // of this machine
	Log        *slog.Logger
}

// Limits bound what a process may have of its pod. 0: no limit.
type Limits struct {
	Memory int64 // bytes
	// Watched says that the process is a watchdog, which has its program in a pod with its limits.
	Watched bool
}

// Usage is what a process has used.
type Usage struct {
	CPU    time.Duration
	Memory int64 // bytes now
}

// Groups resizes pods in place of making cgroups. A family is a pod. Its members are the processes
// in it: a zygote and its forks, or a process without forks. Before a fork, the pod gets the fork's
// share in addition; when the fork has ended, the pod loses it.
//
// The limits of a pod hold for its processes together. If the cluster cannot resize pods, they keep
// what they have, and Groups logs that.
type Groups struct {
	cfg GroupsConfig

	mu       sync.Mutex
	families map[string]*family
	fixed    time.Time // until then, the cluster counts as one that cannot resize pods
}

// NewGroups returns Groups without families.
func NewGroups(cfg GroupsConfig) *Groups {
	return &Groups{cfg: cfg, families: map[string]*family{}}
}

// family is a pod and the shares of its processes. The mutex of Groups guards it, but for turn.
type family struct {
	of              *Groups
	key             string // of Groups.families
	namespace, name string
	members         map[string]*Share
	wanted, applied int            // versions of members
	runs            bool           // the pod runs
	bounded         bool           // it has a limit on the processor, which cannot be taken away again
	capped          bool           // the same for memory
	keeps           bool           // its limit on memory must not fall below most
	most            int64          // highest limit on memory so far, in bytes
	base            int64          // bytes of its zygote with all that is shared; 0: not known yet
	has             kube.Resources // as the pod was last resized

	turn sync.Mutex // held while the pod is resized; taken before the mutex of Groups
}

// Share is what a process has of its pod. Its methods are those of a cgroup.
type Share struct {
	of     *family
	name   string
	first  bool  // it is the process that the pod was made for
	memory int64 // limit in bytes; 0: none
	milli  int   // limit on the processor, in thousandths of a core; 0: none
	starts bool  // it has not been told its limit on the processor

	pids *os.File // reading end of the pipe that stands for its cgroup

	mu   sync.Mutex
	pid  int   // 0: not known yet
	used Usage // as of the latest measurement
}

const resizeTimeout = 5 * time.Second

// Create returns the share of a new process of a function: name is FAMILY/NAME, or the name of a
// process without forks. If the process is a fork, Create returns once the pod has been resized for
// it.
func (g *Groups) Create(name, function string, l Limits) (*Share, error) {
	if l.Watched {
		return &Share{}, nil
	}
	key, own := path.Split(name)
	if key = strings.TrimSuffix(key, "/"); key == "" {
		key = own
	}
	short, namespace := g.cfg.Named(function)
	if !slices.Contains(g.cfg.Namespaces, namespace) {
		return nil, fmt.Errorf("namespace %q of the function: want one of --pod-namespaces", namespace)
	}
	s := &Share{name: name, first: key == own, starts: true}
	if zygote := s.first && key != name; !zygote { // a zygote's limit is the node's
		s.memory = l.Memory
	}
	g.mu.Lock()
	s.of = g.families[key]
	if s.of == nil {
		s.of = &family{of: g, key: key, namespace: namespace, name: podName(short, key), members: map[string]*Share{}, has: kube.Resources{Requests: firstRequests}}
		g.families[key] = s.of
	}
	s.of.members[name] = s
	s.of.wanted++
	g.mu.Unlock()
	if s.first {
		return s, nil
	}
	s.of.weigh()
	if err := s.of.settle(true); err != nil {
		if !s.drop() {
			_ = s.of.settle(false) // what is left is what the pod had
		}
		return nil, err
	}
	return s, nil
}

// weigh measures the zygote of a pod, which has loaded, once.
func (f *family) weigh() {
	f.of.mu.Lock()
	var zygote *Share
	for _, s := range f.members {
		if s.first && f.base == 0 {
			zygote = s
		}
	}
	f.of.mu.Unlock()
	if zygote == nil {
		return
	}
	bytes, err := sandbox.PSS(zygote.process())
	if err != nil { // it has ended, and so does the start
		return
	}
	f.of.mu.Lock()
	defer f.of.mu.Unlock()
	f.base = bytes + bytes/4
}

// settle resizes the pod, unless another call has done so since the caller's change. Calls at the
// same time share one request. With more, the pod grows, and settle returns the kubelet's refusal.
func (f *family) settle(more bool) error {
	g := f.of
	g.mu.Lock()
	mine := f.wanted
	g.mu.Unlock()
	f.turn.Lock()
	defer f.turn.Unlock()
	g.mu.Lock()
	if f.applied >= mine || !f.runs || time.Now().Before(g.fixed) {
		g.mu.Unlock()
		return nil
	}
	version, wanted := f.wanted, f.resources()
	if same(wanted, f.has) {
		f.applied = version
		g.mu.Unlock()
		return nil
	}
	g.mu.Unlock()
	sent, err := f.resize(wanted, more)
	if !sent && f.keepsMemory(err, wanted) {
		g.mu.Lock()
		wanted = f.resources()
		g.mu.Unlock()
		sent, err = f.resize(wanted, more)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	var refused *kube.Refused
	switch {
	case err == nil:
		f.applied, f.has = version, wanted
		if limit, err := strconv.ParseInt(wanted.Limits["memory"], 10, 64); err == nil {
			f.most = max(f.most, limit)
		}
	case sent: // what the pod has is not known
		f.has = kube.Resources{}
	case errors.As(err, &refused) && refused.Status == http.StatusNotFound && !strings.Contains(refused.Message, f.name):
		g.fixed = time.Now().Add(fixedFor)
		g.cfg.Log.Warn("this cluster cannot resize pods, want Kubernetes 1.33 or later: pods of functions keep what they have", "error", err, "retry", fixedFor)
		return nil
	}
	return err
}

// fixedFor is how long a cluster counts as one that cannot resize pods, after it has said so.
const fixedFor = 10 * time.Minute

// keepsMemory reports whether a resize was refused because it lowers the limit on memory, which
// Kubernetes 1.33 does. From then on, the pod keeps its highest limit.
func (f *family) keepsMemory(err error, to kube.Resources) bool {
	var refused *kube.Refused
	if !errors.As(err, &refused) || refused.Status != http.StatusUnprocessableEntity {
		return false
	}
	f.of.mu.Lock()
	defer f.of.mu.Unlock()
	limit, _ := strconv.ParseInt(to.Limits["memory"], 10, 64) // 0: none
	if f.keeps || limit >= f.most {
		return false
	}
	f.keeps = true
	return true
}

// Bounds of the wait for the kubelet after a resize.
const (
	kubeletTime  = 300 * time.Millisecond
	kubeletPause = 20 * time.Millisecond
)

// resize resizes the pod. With more, it waits a moment for the kubelet, and returns why the kubelet
// does not do it. A kubelet that is slow to answer does not delay the fork further. sent reports
// whether the API server has accepted the resize.
func (f *family) resize(to kube.Resources, more bool) (sent bool, err error) {
	g, begin := f.of, time.Now()
	ctx, cancel := context.WithTimeout(context.Background(), resizeTimeout)
	defer cancel()
	pod, err := g.cfg.Cluster.ResizePod(ctx, f.namespace, f.name, Container, to)
	if err != nil {
		return false, err
	}
	asked := time.Since(begin)
	done := !more
	for wanted := pod.Metadata.Generation; !done && time.Since(begin) < kubeletTime; {
		time.Sleep(kubeletPause)
		if pod, err = g.cfg.Cluster.Pod(ctx, f.namespace, f.name); err != nil {
			return true, err
		}
		if done, err = pod.Resized(wanted); err != nil {
			return true, err
		}
	}
	g.cfg.Log.Debug("a pod is resized", "pod", f.name, "asked", asked, "took", time.Since(begin), "done", done,
		"requests", to.Requests, "limits", to.Limits)
	return true, nil
}

func same(a, b kube.Resources) bool {
	return maps.Equal(a.Requests, b.Requests) && maps.Equal(a.Limits, b.Limits)
}

// Parts of a pod that are no process's.
const (
	ownMemory = 32 << 20 // bytes: its first program, and pages of the kernel
	spareCPU  = 100      // thousandths of a core
)

// resources returns what the pod has to have. Its requests are what its processes may have, as far
// as that is bounded. They differ from the limits: a pod's class of service must not change. The
// caller holds the mutex of Groups.
func (f *family) resources() kube.Resources {
	var milli int
	var memory int64
	openCPU, openMemory, bounds := false, false, false
	for _, s := range f.members {
		milli += s.milli
		memory += s.memory
		openCPU = openCPU || s.milli == 0 && !s.starts
		bounds = bounds || s.memory > 0
		openMemory = openMemory || s.memory == 0 && !(s.first && f.base > 0)
	}
	f.bounded = f.bounded || milli > 0
	memory += f.base
	r := kube.Resources{Requests: map[string]string{"cpu": strconv.Itoa(10+milli) + "m", "memory": strconv.FormatInt(ownMemory+memory, 10)}}
	limits := map[string]string{}
	if f.bounded {
		limits["cpu"] = strconv.Itoa(spareCPU+milli) + "m"
		if openCPU || milli == 0 {
			limits["cpu"] = strconv.Itoa(max(1000*f.of.cfg.Cores, spareCPU+milli)) + "m"
		}
	}
	if f.capped = f.capped || bounds && !openMemory; f.capped {
		limit := 2*ownMemory + memory
		if f.keeps {
			limit = max(limit, f.most)
		}
		limits["memory"] = strconv.FormatInt(limit, 10)
	}
	if len(limits) > 0 {
		r.Limits = limits
	}
	return r
}

// Files returns a pipe in place of files of cgroups. From it, the share learns its process: whoever
// moves a process into a group writes the number of the process. A process that enters by itself
// writes 0, and is not measured. The caller closes the file.
func (s *Share) Files() ([]*os.File, error) {
	if s.of == nil {
		return nil, nil
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	s.pids = r
	return []*os.File{w}, nil
}

// process returns the number of the share's process; 0: it is not known.
func (s *Share) process() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pid == 0 && s.pids != nil {
		s.pid, _ = strconv.Atoi(readNow(s.pids)) // empty: nobody has written yet
	}
	return s.pid
}

// readNow returns what there is to read from a pipe, without waiting.
func readNow(f *os.File) string {
	b, n := make([]byte, 16), 0
	raw, err := f.SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool { n, _ = unix.Read(int(fd), b); return true })
	}
	if err != nil || n < 0 {
		return ""
	}
	return string(b[:n])
}

// Enforce says which process the pod was made for, and that it runs.
func (s *Share) Enforce(pid int) error {
	if !s.first {
		return nil
	}
	s.mu.Lock()
	s.pid = pid
	s.mu.Unlock()
	s.of.of.mu.Lock()
	s.of.runs = true
	s.of.of.mu.Unlock()
	return s.of.settle(true)
}

// SetCPU sets the limit on the processor, in thousandths of a core; 0: none.
func (s *Share) SetCPU(milli int) error {
	if s.of == nil {
		return nil
	}
	s.of.of.mu.Lock()
	s.milli, s.starts = milli, false
	s.of.wanted++
	s.of.of.mu.Unlock()
	return s.of.settle(false) // a kubelet that refuses more refuses the next fork
}

// Usage returns what the process and its children have used. A fork's memory includes its part of
// what it shares with its zygote.
func (s *Share) Usage() Usage {
	pid := s.process()
	s.mu.Lock()
	defer s.mu.Unlock()
	if pid == 0 {
		return s.used
	}
	memory, cpu, err := sandbox.Tree(pid)
	if err == nil {
		s.used.Memory, s.used.CPU = memory, cpu
	}
	return s.used // if it has ended, what it has used stays
}

// Remove gives the share back, once the process has ended.
func (s *Share) Remove() error {
	if s.of == nil {
		return nil
	}
	s.mu.Lock()
	if s.pids != nil {
		_ = s.pids.Close()
	}
	s.mu.Unlock()
	if s.drop() {
		return nil
	}
	return s.of.settle(false)
}

// drop takes the share from its pod. It reports whether the pod has no other.
func (s *Share) drop() (last bool) {
	g := s.of.of
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(s.of.members, s.name)
	s.of.wanted++
	if s.of.runs = s.of.runs && !s.first; s.first || len(s.of.members) == 0 { // the pod goes, too
		delete(g.families, s.of.key)
	}
	return s.first || len(s.of.members) == 0
}
