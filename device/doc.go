// Package device watches a machine's accelerators: which there are, how much of their memory is in use and by whom, how busy they
// are, and whether they are well. It is the only importer of NVIDIA's management library (NVML).
//
//	w := device.Open(device.Config{Share: share, Log: log})
//	defer w.Close()
//	for _, d := range w.Devices() { … }
//
// A machine without the library has no devices, and no error. A GPU that is divided (MIG) is not a device, its instances are, each
// with memory of its own. A GPU is not well when it is lost, reports uncorrected memory errors, waits for a reset to remap rows, or
// has reported a critical error (XID) of late; see health.go. When it is well again, it says so by itself.
//
// Calls into NVML may hang with the driver. They are all made by one goroutine, which owns the library from Init to Shutdown;
// [Watch.Devices] never waits for it, and says of all devices that they are not well when it does not come back.
package device
