package keysmanager

import (
	"cmp"
	"fmt"
	"runtime"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cache"
	"github.com/stagecoach-serving/stagecoach/keysmanager/node"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// Inventory describes a node, what it has in memory, and which replicas run. Slices are sorted by
// function, then by digest or name.
type Inventory struct {
	Node       string
	Memory     int64  // bytes, of the bound that leaves least room
	MemoryUsed int64  // bytes of Memory in use now, as that bound counts them
	Threshold  int64  // bytes of Memory; above this, idle zygotes are evicted; see [Threshold]
	Bound      string // name of that bound: --memory, cgroup or machine
	Free       int64  // bytes that a load finds without eviction, under the thresholds of all bounds
	CPUMilli   int
	Devices    []DeviceInfo // sorted by ID
	Zygotes    []ZygoteInfo
	Failures   []Failure
	Replicas   []ReplicaInfo
	Spares     map[string]int // by function: spare containers that are ready
	Counts
}

// Counts are of events since the Manager's start.
type Counts struct {
	Hits, Misses uint64  // starts that found their zygote, and starts that did not
	Evictions    uint64  // because memory was short: Evicted.Memory and Evicted.Pressure
	Refused      uint64  // loads that could not fit
	Evicted      Evicted // zygotes that were ended, by reason
}

// Evicted counts zygotes that were ended, by reason.
type Evicted struct {
	// To make room for another load, or because this node's processes passed the threshold of
	// --memory.
	Memory      uint64
	Pressure    uint64 // because the machine or the cgroup passed its threshold
	Invalidated uint64 // by Invalidate, a redeploy with other parameters, or Forget
	Asked       uint64 // by Evict
}

// The states of a ZygoteInfo.
const (
	Loading  = "loading"
	Ready    = "ready"
	Retiring = "retiring" // nothing starts from it any more; it ends when its replicas have ended
)

// ZygoteInfo describes a parameter set in memory.
type ZygoteInfo struct {
	PID int // 0 while it loads
	// Function that uses it: the first by name if there are several. If the zygote retires, the
	// function that it was loaded for. Empty for a worker.
	Function   string
	Digest     string // of the image
	Bytes      int64  // proportional set size once loaded; while it loads, the expected size
	Replicas   int
	Load       time.Duration
	Namespace  string
	Model      string // of the image
	Generation uint64 // how often these parameters have been invalidated
	State      string
	Key        bool      // a key stage's: evicted last
	Path       string    // how replicas start from it
	Worker     string    // name of the worker; empty: a zygote, not a worker
	Device     string    // of a worker; empty: the CPU
	LastUsed   time.Time // by a start; zero: never used
	Usage      *Usage    // nil: not measured
}

// Failure is a zygote that did not load or that ended. The next order after Retry loads it again.
type Failure struct {
	Function string // as in ZygoteInfo
	Digest   string
	Count    int // in a row
	Retry    time.Time
	Cause    string
}

// ReplicaInfo describes a replica that runs.
type ReplicaInfo struct {
	Name, Function string
	PID            int
	Path           string // as in node.Started
	Device         string // as in node.Order
	Started        time.Time
	Phases         []node.Phase
	CPUMilli       int    // CPU limit in thousandths of a core; 0: none
	Usage          *Usage // nil: not measured
	// Entry is its entry of the warden. A container that was a spare has it as its name.
	Entry string
}

// Inventory returns the node's inventory as of now.
func (m *Manager) Inventory() Inventory {
	m.measure()
	now := m.loader.weigh(resources.SampleFresh)
	m.store.mu.Lock()
	defer m.store.mu.Unlock()
	b, _ := cache.Tightest(now.Bounds, Threshold)
	inv := Inventory{
		Node: m.cfg.Node, Memory: b.Total, MemoryUsed: b.Used, Threshold: int64(float64(b.Total) * Threshold), Bound: b.Name,
		Free: max(0, m.store.slots.cache.Free(now.Bounds)), CPUMilli: 1000 * runtime.GOMAXPROCS(0), Devices: m.parker.devices(),
		Spares: m.spares.count(), Counts: m.store.counts,
	}
	for _, k := range m.store.slots.Keys() {
		s, _ := m.store.slots.Peek(k)
		if s.loading != nil || s.zygote != nil && s.zygote.Alive() {
			inv.Zygotes = append(inv.Zygotes, m.store.info(k, s))
		} else if s.err != nil {
			e := m.store.slots.Entry(k)
			inv.Failures = append(inv.Failures, Failure{m.store.nameOf(k, s), k.Digest, cmp.Or(e.Fails, e.Ends), e.Retry, s.err.Error()})
		}
	}
	inv.Replicas = m.store.processes.infos()
	slices.SortFunc(inv.Zygotes, func(a, b ZygoteInfo) int {
		return cmp.Or(cmp.Compare(a.Function, b.Function), cmp.Compare(a.Digest, b.Digest), cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Device, b.Device))
	})
	slices.SortFunc(inv.Failures, func(a, b Failure) int {
		return cmp.Or(cmp.Compare(a.Function, b.Function), cmp.Compare(a.Digest, b.Digest))
	})
	slices.SortFunc(inv.Replicas, func(a, b ReplicaInfo) int {
		return cmp.Or(cmp.Compare(a.Function, b.Function), cmp.Compare(a.Name, b.Name))
	})
	return inv
}

// info describes a slot whose zygote is ready or loads. The caller holds the store's mutex.
func (st *store) info(k zygote.Key, s *slot) ZygoteInfo {
	e := st.slots.Entry(k)
	z := ZygoteInfo{
		Function: st.nameOf(k, s), Digest: k.Digest, Namespace: k.Namespace, Worker: k.Worker, Device: k.Device, Model: k.Model, Generation: k.Generation,
		State: Ready, Key: e.KeyStage, LastUsed: s.used,
	}
	switch {
	case s.loading != nil:
		z.State, z.Bytes = Loading, s.need.bytes
	case !e.Since.IsZero():
		z.State = Retiring
	}
	if k.Form == zygote.Worker {
		z.Function = ""
	}
	if s.zygote != nil {
		z.Usage = s.zygote.Held().Group().Info()
		z.PID, z.Bytes, z.Replicas, z.Load, z.Path = s.zygote.PID, s.zygote.Bytes, s.zygote.Family.Replicas(), s.zygote.Load, s.zygote.Path()
	}
	return z
}

// newMetrics registers the metrics that the node's inventory does not have.
func (m *Manager) newMetrics(r prometheus.Registerer) error {
	m.store.retired = prometheus.NewHistogram(prometheus.HistogramOpts{
		Namespace: "stagecoach", Subsystem: "cache", Name: "retire_seconds",
		Help: "How long replaced parameters stayed in memory, for their last replicas, until they were gone.", Buckets: prometheus.ExponentialBuckets(0.001, 4, 12),
	})
	all := []prometheus.Collector{m.store.retired}
	if m.cfg.Groups != nil {
		all = append(all, newUsageMetrics(m))
	}
	for _, c := range all {
		if err := r.Register(c); err != nil {
			return fmt.Errorf("keysmanager: %w", err)
		}
	}
	return nil
}
