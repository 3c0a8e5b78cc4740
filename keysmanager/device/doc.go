// Package device monitors a machine's accelerators. It reports which devices exist, how much of
// their memory is in use and by which processes, how busy they are, and whether they are healthy.
// It is the only package that imports NVIDIA's management library (NVML).
//
//	w := device.Open(device.Config{Share: share, Log: log})
//	defer w.Close()
//	for _, d := range w.Devices() { … }
//
// A machine without the library has no devices, which is not an error. If a GPU is divided (MIG),
// its instances are the devices, each with its own memory. A GPU is unhealthy if it is lost,
// reports uncorrected memory errors, waits for a reset to remap rows, or has recently reported a
// critical error (XID); see health.go. When the fault is gone, the GPU is healthy again without an
// operator.
//
// A call into NVML may hang if the driver hangs. One goroutine makes all calls, and owns the
// library from Init to Shutdown. [Watch.Devices] never waits for a call. While a call hangs, it
// reports all devices as unhealthy.
package device
