package device

import (
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// reopenEvery is how often the library is opened again while a device is lost. Without that, the
// library would not see the device again after a reset.
const reopenEvery = 30 * time.Second

// reader calls the library. It belongs to one goroutine.
type reader struct {
	lib   Library
	share Share
	log   *slog.Logger

	open   bool
	opened time.Time
	events nvml.EventSet // nil: none are told
	known  map[string]known
	order  []string // known devices in the order in which they were first seen

	trouble map[string]trouble // by troubleKey
}

// known is a device that has been seen.
type known struct {
	Info
	gpu string // UUID of the GPU that it is, or belongs to
}

// read reads all devices of the share. If the library does not exist at the first read, it stays
// closed.
func (r *reader) read(now time.Time) []Info {
	lost := false
	for _, k := range r.known {
		lost = lost || k.Fault.Kind != Healthy
	}
	if r.open && lost && now.Sub(r.opened) >= reopenEvery {
		r.shutdown()
	}
	fault := Fault{}
	if !r.open {
		fault = r.init(now)
	}
	if r.open {
		r.watchEvents(now)
		fault = r.readAll(now)
	}
	out := []Info{}
	for _, uuid := range r.order {
		k := r.known[uuid]
		if fault.Kind != Healthy {
			k.Fault = fault
			r.known[uuid] = k
		}
		if r.share.has(k.Info, k.gpu) {
			out = append(out, k.Info)
		}
	}
	return out
}

// init opens the library. It returns the fault that all known devices have if that failed.
func (r *reader) init(now time.Time) Fault {
	r.opened = now
	switch ret := r.lib.Init(); {
	case ret == nvml.SUCCESS:
		r.open = true
		r.register()
		return Fault{}
	case len(r.order) > 0:
		return Fault{Unreadable, "NVML does not start: " + ret.Error()}
	case ret == nvml.ERROR_LIBRARY_NOT_FOUND:
		r.log.Info("no devices: this machine has no NVIDIA driver")
	default:
		r.log.Warn("no devices: NVML does not start", "error", ret.Error())
	}
	return Fault{}
}

func (r *reader) shutdown() {
	if r.events != nil {
		_ = r.events.Free() // closing the library closes the rest
		r.events = nil
	}
	_ = r.lib.Shutdown()
	r.open = false
}

// has reports whether the library has a function. Calling a missing function would end the process.
func (r *reader) has(symbol string) bool { return r.lib.Extensions().LookupSymbol(symbol) == nil }

// readAll looks at each GPU. It returns the fault that all known devices have if that failed.
func (r *reader) readAll(now time.Time) Fault {
	n, ret := r.lib.DeviceGetCount()
	if ret != nvml.SUCCESS {
		return Fault{Unreadable, "NVML counts no devices: " + ret.Error()}
	}
	seen := map[string]bool{} // GPUs that answered
	there := map[string]bool{}
	for i := range n {
		gpu, all := r.readGPU(i, now)
		seen[gpu] = gpu != ""
		for _, d := range all {
			there[d.UUID] = true
			r.keep(known{d, gpu})
		}
	}
	order := r.order[:0]
	for _, uuid := range r.order {
		k := r.known[uuid]
		switch {
		case there[uuid]:
		case seen[k.gpu]: // the GPU was divided, or is no more
			delete(r.known, uuid)
			continue
		default:
			k.Fault, k.Utilisation, k.Processes = Fault{Lost, "it is lost: it does not answer any more"}, unknown, nil
			k.Temperature, k.Power = 0, 0
			r.known[uuid] = k
		}
		order = append(order, uuid)
	}
	r.order = order
	return Fault{}
}

func (r *reader) keep(k known) {
	if _, old := r.known[k.UUID]; !old {
		r.order = append(r.order, k.UUID)
	}
	r.known[k.UUID] = k
}

// unknown is a utilisation that the driver does not report.
const unknown = -1

// readGPU reads the GPU with an index. It returns its UUID and its devices, or neither if the GPU
// does not report its UUID.
func (r *reader) readGPU(index int, now time.Time) (gpu string, all []Info) {
	h, ret := r.lib.DeviceGetHandleByIndex(index)
	if ret == nvml.SUCCESS {
		gpu, ret = h.GetUUID()
	}
	if ret != nvml.SUCCESS {
		return "", nil
	}
	fault := r.health(h)
	whole := r.describe(h, strconv.Itoa(index), fault)
	r.readSensors(h, &whole)
	if whole.UUID == "" { // lost between two questions
		whole.UUID = gpu
	}
	if mode, _, ret := r.migMode(h); ret != nvml.SUCCESS || mode != nvml.DEVICE_MIG_ENABLE {
		whole.Fault = first(whole.Fault, r.troubled(gpu, anyInstance, now))
		return gpu, []Info{whole}
	}
	count, _ := h.GetMaxMigDeviceCount() // 0 when it fails
	for i := range count {
		mig, ret := h.GetMigDeviceHandleByIndex(i)
		if ret != nvml.SUCCESS {
			continue // a place without an instance
		}
		d := r.describe(mig, fmt.Sprintf("%d:%d", index, i), fault)
		if d.UUID == "" {
			continue
		}
		id, ret := mig.GetGpuInstanceId()
		if ret != nvml.SUCCESS {
			id = anyInstance
		}
		d.Fault = first(d.Fault, whole.Fault, r.troubled(gpu, anyInstance, now), r.troubled(gpu, id, now))
		all = append(all, d)
	}
	return gpu, all
}

func (r *reader) migMode(h nvml.Device) (current, pending int, ret nvml.Return) {
	if !r.has("nvmlDeviceGetMigMode") {
		return 0, 0, nvml.ERROR_NOT_SUPPORTED
	}
	return h.GetMigMode()
}

// describe reads everything but the health of a device or instance. fault is its known fault.
func (r *reader) describe(h nvml.Device, index string, fault Fault) Info {
	d := Info{Index: index, Utilisation: unknown, Fault: fault}
	fail := func(what string, ret nvml.Return) {
		if ret != nvml.SUCCESS {
			d.Fault = first(d.Fault, why(what, ret))
		}
	}
	var ret nvml.Return
	d.UUID, ret = h.GetUUID()
	fail("its UUID", ret)
	d.Name, ret = h.GetName()
	fail("its name", ret)
	d.Memory, d.Used, ret = r.memory(h)
	fail("its memory", ret)
	if rates, ret := h.GetUtilizationRates(); ret == nvml.SUCCESS {
		d.Utilisation = min(float64(rates.Gpu)/100, 1)
	}
	if processes, ret := h.GetComputeRunningProcesses(); ret == nvml.SUCCESS {
		d.Processes = map[int]int64{}
		for _, p := range processes {
			bytes := p.UsedGpuMemory
			if bytes > math.MaxInt64 { // the driver does not tell
				bytes = 0
			}
			d.Processes[int(p.Pid)] += int64(bytes)
		}
	}
	return d
}

// readSensors reads a GPU's temperature and power. Missing values are not a fault.
func (r *reader) readSensors(h nvml.Device, d *Info) {
	if r.has("nvmlDeviceGetTemperature") {
		if celsius, ret := h.GetTemperature(nvml.TEMPERATURE_GPU); ret == nvml.SUCCESS {
			d.Temperature = int(celsius)
		}
	}
	if r.has("nvmlDeviceGetPowerUsage") {
		if milliwatts, ret := h.GetPowerUsage(); ret == nvml.SUCCESS {
			d.Power = float64(milliwatts) / 1000
		}
	}
}

// memory returns how much memory of a device processes may use, and how much is in use. If the
// driver reports its own memory separately, that memory is part of neither.
func (r *reader) memory(h nvml.Device) (total, used int64, ret nvml.Return) {
	if r.has("nvmlDeviceGetMemoryInfo_v2") {
		if m, ret := h.GetMemoryInfo_v2(); ret == nvml.SUCCESS {
			return int64(m.Total - min(m.Reserved, m.Total)), int64(m.Used), ret
		}
	}
	m, ret := h.GetMemoryInfo()
	return int64(m.Total), int64(m.Used), ret
}
