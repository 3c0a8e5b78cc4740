package device

import (
	"bytes"
	"log/slog"
	"sync"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock"
	"github.com/NVIDIA/go-nvml/pkg/nvml/mock/dgxa100"
)

// fleet is NVIDIA's mock of a DGX A100 with eight GPUs. It adds what the mock lacks: memory,
// processes, health, instances and events.
type fleet struct {
	*dgxa100.Server
	gpus [8]*gpu

	mu       sync.Mutex
	inits    int
	shut     int
	fails    nvml.Return   // result of Init
	hang     chan struct{} // if not nil, counting devices blocks on it
	events   []nvml.EventData
	watching int // GPUs with registered events since the last Init
}

// gpu is the state of one GPU, guarded by the fleet's mutex.
type gpu struct {
	*dgxa100.Device
	lost, pending, failed bool
	ecc                   uint64
	used                  uint64
	busy                  uint32 // per cent
	celsius, milliwatts   uint32 // 0: not reported
	processes             []nvml.ProcessInfo
	instances             []*mock.Device
	asked                 nvml.Return // result when asked for its errors
}

const gib = 1 << 30

func newFleet() *fleet {
	f := &fleet{Server: dgxa100.New()}
	for i := range f.gpus {
		f.gpus[i] = &gpu{Device: f.Devices[i].(*dgxa100.Device)} //nolint:forcetypeassert // known
		f.open(f.gpus[i])
	}
	f.InitFunc = func() nvml.Return {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.inits++
		f.watching = 0
		return f.fails
	}
	f.ShutdownFunc = func() nvml.Return {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.shut++
		return nvml.SUCCESS
	}
	f.DeviceGetCountFunc = func() (int, nvml.Return) {
		f.mu.Lock()
		hang := f.hang
		f.mu.Unlock()
		if hang != nil {
			<-hang
		}
		return len(f.gpus), nvml.SUCCESS
	}
	f.EventSetCreateFunc = func() (nvml.EventSet, nvml.Return) {
		return &mock.EventSet{WaitFunc: f.wait, FreeFunc: func() nvml.Return { return nvml.SUCCESS }}, nvml.SUCCESS
	}
	return f
}

func (f *fleet) wait(uint32) (nvml.EventData, nvml.Return) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.events) == 0 {
		return nvml.EventData{}, nvml.ERROR_TIMEOUT
	}
	e := f.events[0]
	f.events = f.events[1:]
	return e, nvml.SUCCESS
}

// open gives a GPU the functions that the mock lacks.
func (f *fleet) open(g *gpu) {
	uuid := g.UUID
	g.GetUUIDFunc = func() (string, nvml.Return) { return uuid, f.of(g) }
	g.GetMemoryInfo_v2Func = func() (nvml.Memory_v2, nvml.Return) {
		f.mu.Lock()
		defer f.mu.Unlock()
		return nvml.Memory_v2{Total: 40 * gib, Reserved: gib, Used: g.used, Free: 39*gib - g.used}, lostOr(g.lost)
	}
	g.GetUtilizationRatesFunc = func() (nvml.Utilization, nvml.Return) { return nvml.Utilization{Gpu: g.busy}, f.of(g) }
	tell := func(v *uint32) (uint32, nvml.Return) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if *v == 0 {
			return 0, nvml.ERROR_NOT_SUPPORTED
		}
		return *v, lostOr(g.lost)
	}
	g.GetTemperatureFunc = func(nvml.TemperatureSensors) (uint32, nvml.Return) { return tell(&g.celsius) }
	g.GetPowerUsageFunc = func() (uint32, nvml.Return) { return tell(&g.milliwatts) }
	g.GetComputeRunningProcessesFunc = func() ([]nvml.ProcessInfo, nvml.Return) {
		f.mu.Lock()
		defer f.mu.Unlock()
		return g.processes, lostOr(g.lost)
	}
	g.GetTotalEccErrorsFunc = func(nvml.MemoryErrorType, nvml.EccCounterType) (uint64, nvml.Return) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if g.asked != 0 {
			return 0, g.asked
		}
		return g.ecc, lostOr(g.lost)
	}
	g.GetRemappedRowsFunc = func() (int, int, bool, bool, nvml.Return) {
		f.mu.Lock()
		defer f.mu.Unlock()
		return 0, 0, g.pending, g.failed, lostOr(g.lost)
	}
	g.RegisterEventsFunc = func(uint64, nvml.EventSet) nvml.Return {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.watching++
		return nvml.SUCCESS
	}
	g.GetMaxMigDeviceCountFunc = func() (int, nvml.Return) { return 7, nvml.SUCCESS }
	g.GetMigDeviceHandleByIndexFunc = func(i int) (nvml.Device, nvml.Return) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if i >= len(g.instances) || g.instances[i] == nil {
			return nil, nvml.ERROR_NOT_FOUND
		}
		return g.instances[i], nvml.SUCCESS
	}
}

func lostOr(lost bool) nvml.Return {
	if lost {
		return nvml.ERROR_GPU_IS_LOST
	}
	return nvml.SUCCESS
}

func (f *fleet) of(g *gpu) nvml.Return {
	f.mu.Lock()
	defer f.mu.Unlock()
	return lostOr(g.lost)
}

// divide divides a GPU into instances of 5 GiB (1g.5gb); "" leaves a place empty.
func (f *fleet) divide(g *gpu, uuids ...string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	g.MigMode = nvml.DEVICE_MIG_ENABLE
	g.instances = nil
	for i, uuid := range uuids {
		if uuid == "" {
			g.instances = append(g.instances, nil)
			continue
		}
		g.instances = append(g.instances, &mock.Device{
			GetUUIDFunc:                    func() (string, nvml.Return) { return uuid, f.of(g) },
			GetNameFunc:                    func() (string, nvml.Return) { return "Mock NVIDIA A100-SXM4-40GB MIG 1g.5gb", nvml.SUCCESS },
			GetMemoryInfo_v2Func:           func() (nvml.Memory_v2, nvml.Return) { return nvml.Memory_v2{Total: 5 * gib}, f.of(g) },
			GetUtilizationRatesFunc:        func() (nvml.Utilization, nvml.Return) { return nvml.Utilization{}, nvml.ERROR_NOT_SUPPORTED },
			GetComputeRunningProcessesFunc: func() ([]nvml.ProcessInfo, nvml.Return) { return nil, nvml.SUCCESS },
			GetGpuInstanceIdFunc:           func() (int, nvml.Return) { return i + 7, nvml.SUCCESS },
		})
	}
}

// set changes the state of the fleet.
func (f *fleet) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

// xid reports an error of a GPU or of one of its instances.
func (f *fleet) xid(g *gpu, n uint64, instance uint32) {
	f.set(func() {
		f.events = append(f.events, nvml.EventData{Device: g, EventType: nvml.EventTypeXidCriticalError, EventData: n, GpuInstanceId: instance})
	})
}

// open opens a watch over a fleet. The returned function returns the log.
func open(t *testing.T, f *fleet, share string) (*Watch, func() string) {
	t.Helper()
	s, err := ParseShare(share)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var b bytes.Buffer
	log := slog.New(slog.NewTextHandler(writer(func(p []byte) (int, error) {
		mu.Lock()
		defer mu.Unlock()
		return b.Write(p)
	}), nil))
	w := Open(Config{Share: s, Library: f, Log: log})
	t.Cleanup(w.Close)
	return w, func() string {
		mu.Lock()
		defer mu.Unlock()
		return b.String()
	}
}

type writer func(p []byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }
