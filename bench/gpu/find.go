package gpu

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/bench"
	"github.com/stagecoach-serving/stagecoach/bench/starts"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/keysmanager"
	"github.com/stagecoach-serving/stagecoach/keysmanager/device"
)

// noDevice is the exit status of a benchmark whose device this machine does not have.
const noDevice = 3

// nvmlFolders are the folders of NVIDIA's libraries on machines whose linker may not search them.
var nvmlFolders = []string{
	"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib",
	"/run/nvidia/driver/usr/lib/x86_64-linux-gnu", "/usr/lib/wsl/lib",
}

// findNVML returns the first path of NVML in LD_LIBRARY_PATH and the folders, or an empty path if
// they do not have it.
func findNVML(folders []string) string {
	for _, dir := range append(filepath.SplitList(os.Getenv("LD_LIBRARY_PATH")), folders...) {
		path := filepath.Join(dir, "libnvidia-ml.so.1")
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() {
			return path
		}
	}
	return ""
}

// gpuDevice is the device that is measured.
type gpuDevice struct {
	starts.Device
	look func(ctx context.Context) (keysmanager.Device, error) // as it is now
	// all returns this device alone, as it was seen last, for a KeysManager.
	all   func() []keysmanager.Device
	close func()
}

// openGPU finds the device that the argument share names, and an interpreter for it. It reports
// both as progress and in the report.
func openGPU(ctx context.Context, devices func(*device.Watch) []keysmanager.Device, share, python string, report *bench.Report) (d gpuDevice, py starts.Python, err error) {
	if share == "cpu" {
		if py, err = starts.FindTorch(ctx, python, false); err != nil {
			return d, py, err
		}
		py.Tell(report)
		console.Progress("bench gpu: python %s (%s), torch %s; stages compute on the CPU", py.Python, py.Program, py.Torch)
		return fixedDevice(standIn()), py, nil
	}
	s, err := device.ParseShare(share)
	if err != nil {
		return d, py, fmt.Errorf("--device: %w", err)
	}
	path := findNVML(nvmlFolders)
	if dir := filepath.Dir(path); path != "" && !slices.Contains(filepath.SplitList(os.Getenv("LD_LIBRARY_PATH")), dir) && !strings.HasPrefix(dir, "/usr/lib") {
		// Stages then find NVML, too, and the driver's other libraries beside it. The error can be
		// ignored: Setenv fails only for bad names.
		_ = os.Setenv("LD_LIBRARY_PATH", strings.Trim(os.Getenv("LD_LIBRARY_PATH")+":"+dir, ":"))
	}
	watch := device.Open(device.Config{Share: s, Path: path, Log: slog.New(slog.DiscardHandler)})
	defer func() {
		if err != nil {
			watch.Close()
		}
	}()
	seen, ill := firstWell(devices(watch))
	if ill != nil && share != "all" {
		return d, py, console.ExitError{Status: noDevice, Err: fmt.Errorf("--device %s: %w; --device cpu tries all of it without a GPU", share, ill)}
	}
	if py, err = starts.FindTorch(ctx, python, true); err != nil {
		if ill != nil { // there is no device, so PyTorch finds none
			err = console.ExitError{Status: noDevice, Err: fmt.Errorf("--device %s: %w; --device cpu tries all of it without a GPU (%w)", share, ill, err)}
		}
		return d, py, err
	}
	py.Tell(report)
	console.Progress("bench gpu: python %s (%s), torch %s", py.Python, py.Program, py.Torch)
	if d = watchedDevice(watch, devices, seen); ill != nil {
		if seen, err = cudaDevice(ctx, py); err != nil {
			return d, py, fmt.Errorf("%w; PyTorch: %w", ill, err)
		}
		watch.Close()
		d = fixedDevice(seen)
		d.Device = starts.Device{Name: "cuda:0", ID: seen.ID, Dtype: "BF16"}
		report.Note("device", ill.Error()+": it is PyTorch's first, and nobody knows how much memory of it is used")
	}
	report.With("device", fmt.Sprintf("%s, %d MB", seen.Name, seen.Memory/1e6))
	report.With("cuda", py.CUDA)
	console.Progress("bench gpu: device %s %s, %d MB; CUDA %s; NVML %s", seen.ID, seen.Name, seen.Memory/1e6, py.CUDA, cmp.Or(path, "as the linker finds it"))
	return d, py, nil
}

// watchedDevice returns the device of a watch. Closing the device ends the watch.
func watchedDevice(watch *device.Watch, devices func(*device.Watch) []keysmanager.Device, seen keysmanager.Device) gpuDevice {
	all := only(func() []keysmanager.Device { return devices(watch) }, seen.ID)
	look := func(ctx context.Context) (keysmanager.Device, error) {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		if err := watch.Look(ctx); err != nil {
			return keysmanager.Device{}, fmt.Errorf("NVML: %w", err)
		}
		return firstWell(all())
	}
	return gpuDevice{starts.Device{Name: "cuda:0", ID: seen.ID, Dtype: "BF16"}, look, all, watch.Close}
}

// fixedDevice returns a device whose used memory is unknown.
func fixedDevice(d keysmanager.Device) gpuDevice {
	return gpuDevice{starts.OnCPU, func(context.Context) (keysmanager.Device, error) { return d, nil }, func() []keysmanager.Device { return []keysmanager.Device{d} }, func() {}}
}

// cudaDevice asks PyTorch for its first device, for machines where NVML shows none.
func cudaDevice(ctx context.Context, py starts.Python) (keysmanager.Device, error) {
	const code = `import json, torch
p = torch.cuda.get_device_properties(0)
print(json.dumps({"Name": p.name, "Memory": p.total_memory}))`
	d := keysmanager.Device{ID: "0", Utilisation: -1} // CUDA takes numbers, too
	if first, _, _ := strings.Cut(os.Getenv("CUDA_VISIBLE_DEVICES"), ","); first != "" {
		d.ID = first
	}
	out, err := starts.Output(ctx, py.Program, "-c", code)
	if err == nil {
		err = json.Unmarshal(out, &d)
	}
	return d, err
}

// firstWell returns the first device that may be used.
func firstWell(all []keysmanager.Device) (keysmanager.Device, error) {
	if len(all) == 0 {
		return keysmanager.Device{}, errors.New("NVML shows no GPU on this machine")
	}
	i := slices.IndexFunc(all, func(d keysmanager.Device) bool { return d.Unhealthy == "" })
	if i < 0 {
		return keysmanager.Device{}, fmt.Errorf("no GPU is well: %s: %s", all[0].ID, all[0].Unhealthy)
	}
	return all[i], nil
}

// standIn is the device that a KeysManager uses if stages compute on the CPU. Its ID tells CUDA and
// the stages that there is no GPU.
func standIn() keysmanager.Device {
	return keysmanager.Device{ID: starts.OnCPU.ID, Name: "CPU", Memory: starts.MemAvailable(), Utilisation: -1}
}

// only chooses one of the devices.
func only(all func() []keysmanager.Device, id string) func() []keysmanager.Device {
	return func() []keysmanager.Device {
		return slices.DeleteFunc(all(), func(d keysmanager.Device) bool { return d.ID != id })
	}
}

// hostFree returns how many bytes of memory processes can get, file caches included.
func hostFree() (int64, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "MemAvailable:"); ok {
			kb, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kb << 10, err
		}
	}
	return 0, fmt.Errorf("/proc/meminfo: %w: MemAvailable", fs.ErrNotExist)
}
