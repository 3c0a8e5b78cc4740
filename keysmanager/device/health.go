package device

import (
	"fmt"
	"slices"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
)

// FaultKind says what is wrong with a device.
type FaultKind string

// The kinds of a [Fault].
const (
	Healthy       FaultKind = ""
	Lost          FaultKind = "lost"           // the GPU does not answer any more
	ResetRequired FaultKind = "reset required" // the driver wants a reset
	CriticalError FaultKind = "critical error" // it has reported an XID a short time ago
	MemoryErrors  FaultKind = "memory errors"  // uncorrected ones, or a row that has to be remapped
	Unreadable    FaultKind = "unreadable"     // a question about it failed
	Unanswered    FaultKind = "unanswered"     // the library has not answered in time
)

// Fault says why nothing may run on a device. The zero Fault means that the device is healthy.
type Fault struct {
	Kind FaultKind
	Text string // for people: what is wrong, and what to do
}

// quarantine is how long a device is not used after a critical error.
const quarantine = 10 * time.Minute

// applicationErrors lists the XIDs that a faulty program causes on a healthy device. NVIDIA's
// device plugin for Kubernetes ignores them, too:
//
//   - 13: illegal instruction or access
//   - 31: page fault
//   - 43, 45: a channel that was stopped or cleaned up
//   - 68: video decoder
//   - 109: a context switch that timed out
var applicationErrors = []uint64{13, 31, 43, 45, 68, 109}

// anyInstance is the id of a GPU instance that means the whole GPU.
const anyInstance = 0xFFFFFFFF

// eventsAtOnce bounds how many events are read per look.
const eventsAtOnce = 256

// trouble is a critical error that a device has reported.
type trouble struct {
	xid uint64
	at  time.Time
}

func troubleKey(gpu string, instance int) string { return fmt.Sprintf("%s/%d", gpu, instance) }

// troubled returns the critical error that a GPU, or an instance of it, has reported recently.
func (r *reader) troubled(gpu string, instance int, now time.Time) Fault {
	t, ok := r.trouble[troubleKey(gpu, instance)]
	if !ok {
		return Fault{}
	}
	left := t.at.Add(quarantine).Sub(now)
	if left <= 0 {
		delete(r.trouble, troubleKey(gpu, instance))
		return Fault{}
	}
	return Fault{CriticalError, fmt.Sprintf("critical error XID %d at %s; it is used again %v later if there is no other", t.xid, t.at.UTC().Format(time.TimeOnly), quarantine)}
}

// register subscribes to critical errors. A device without such events is judged by its other
// states.
func (r *reader) register() {
	set, ret := r.lib.EventSetCreate()
	if ret != nvml.SUCCESS {
		r.log.Info("critical errors of devices are not reported", "error", ret.Error())
		return
	}
	r.events = set
	n, _ := r.lib.DeviceGetCount() // 0 if it fails
	for i := range n {
		if h, ret := r.lib.DeviceGetHandleByIndex(i); ret == nvml.SUCCESS {
			// Not all devices support these events.
			_ = h.RegisterEvents(nvml.EventTypeXidCriticalError, set)
		}
	}
}

// watchEvents reads the critical errors since the last look.
func (r *reader) watchEvents(now time.Time) {
	if r.events == nil {
		return
	}
	for range eventsAtOnce {
		e, ret := r.events.Wait(0)
		if ret != nvml.SUCCESS {
			return // no more events, or a lost GPU, which other calls report
		}
		if e.EventType != nvml.EventTypeXidCriticalError || slices.Contains(applicationErrors, e.EventData) {
			continue
		}
		if gpu, ret := e.Device.GetUUID(); ret == nvml.SUCCESS {
			r.trouble[troubleKey(gpu, int(e.GpuInstanceId))] = trouble{e.EventData, now}
		}
	}
}

// health returns what is wrong with a GPU. States that the GPU does not support are skipped.
func (r *reader) health(h nvml.Device) Fault {
	n, ret := h.GetTotalEccErrors(nvml.MEMORY_ERROR_TYPE_UNCORRECTED, nvml.VOLATILE_ECC)
	switch {
	case isFault(ret):
		return why("its memory errors", ret)
	case ret == nvml.SUCCESS && n > 0:
		return Fault{MemoryErrors, fmt.Sprintf("%d uncorrected memory errors (ECC) since it was reset; reset it", n)}
	}
	if !r.has("nvmlDeviceGetRemappedRows") {
		return Fault{}
	}
	_, _, pending, failed, ret := h.GetRemappedRows()
	switch {
	case isFault(ret):
		return why("its remapped rows", ret)
	case ret == nvml.SUCCESS && failed:
		return Fault{MemoryErrors, "a row of its memory could not be remapped; have it replaced"}
	case ret == nvml.SUCCESS && pending:
		return Fault{MemoryErrors, "a row of its memory waits to be remapped; reset it"}
	}
	return Fault{}
}

// isFault reports whether a result is a failure, not an unsupported question.
func isFault(ret nvml.Return) bool {
	switch ret {
	case nvml.SUCCESS, nvml.ERROR_NOT_SUPPORTED, nvml.ERROR_FUNCTION_NOT_FOUND, nvml.ERROR_NO_PERMISSION, nvml.ERROR_INVALID_ARGUMENT:
		return false
	}
	return true
}

// why returns the fault that a result other than success means.
func why(what string, ret nvml.Return) Fault {
	switch ret {
	case nvml.ERROR_GPU_IS_LOST:
		return Fault{Lost, "it is lost: it has fallen off the bus"}
	case nvml.ERROR_RESET_REQUIRED:
		return Fault{ResetRequired, "it has to be reset"}
	}
	return Fault{Unreadable, what + " cannot be read: " + ret.Error()}
}

// first returns the first fault, or none if all of them are Healthy.
func first(all ...Fault) Fault {
	for _, f := range all {
		if f.Kind != Healthy {
			return f
		}
	}
	return Fault{}
}
