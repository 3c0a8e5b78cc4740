// Package device monitors a machine's accelerators. It reports which devices exist, how much of
// their memory is in use and by which processes, how busy they are, and whether they are healthy.
// It is the only package that imports NVIDIA's management library (NVML).
//
//	w := device.Open(device.Config{Share: share, Log: log})
//	defer w.Close()
//	for _, d := range w.Devices() { … }
//
// A machine without the library has no devices, which is not an error. If a GPU is divided (MIG),
// its instances are the devices, each with its own memory. A GPU is unhealthy in these cases (see
// health.go):
//
//   - it is lost;
//   - it reports uncorrected memory errors;
//   - it waits for a reset, for example to remap memory rows;
//   - it has recently reported a critical error (XID).
//
// It counts as healthy again as soon as none of these applies.
//
// Calls into NVML may hang with the driver. One goroutine makes all of them, and owns the library
// from Init to Shutdown. [Watch.Devices] never waits for that goroutine. If a call hangs, Devices
// reports all devices as unhealthy.
package device
