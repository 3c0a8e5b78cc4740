package device

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// bubble runs a test in fake time.
func bubble(t *testing.T, test func(t *testing.T, f *fleet)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { test(t, newFleet()) })
}

// look waits for the next look.
func look() {
	time.Sleep(3*time.Second + time.Millisecond)
	synctest.Wait()
}

func uuids(all []Info) (out []string) {
	for _, d := range all {
		out = append(out, d.UUID)
	}
	return out
}

// ill returns why devices are unhealthy, by index.
func ill(all []Info) map[string]string {
	out := map[string]string{}
	for _, d := range all {
		if d.Fault.Kind != Healthy {
			out[d.Index] = d.Fault.Text
		}
	}
	return out
}

// wantIll checks that exactly these devices are unhealthy, for causes with these texts.
func wantIll(t *testing.T, w *Watch, want map[string]string) {
	t.Helper()
	got := ill(w.Devices())
	for index, why := range want {
		if !strings.Contains(got[index], why) || got[index] == "" {
			t.Errorf("device %s: %q, want %q", index, got[index], why)
		}
		delete(got, index)
	}
	if len(got) > 0 {
		t.Errorf("these are not well either: %v", got)
	}
}

func TestDevicesHaveWhatNVMLReports(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		g := f.gpus[3]
		g.used, g.busy, g.celsius, g.milliwatts = 10*gib, 75, 41, 61_500
		g.processes = []nvml.ProcessInfo{{Pid: 100, UsedGpuMemory: 7 * gib}, {Pid: 101, UsedGpuMemory: ^uint64(0)}}
		w, logged := open(t, f, "all")
		all := w.Devices()
		if len(all) != 8 {
			t.Fatalf("%d devices, want 8: %+v", len(all), all)
		}
		d := all[3]
		if d.UUID != g.UUID || d.Index != "3" || d.Name != "Mock NVIDIA A100-SXM4-40GB" || d.Memory != 39*gib || d.Used != 10*gib || d.Utilisation != 0.75 || d.Temperature != 41 || d.Power != 61.5 {
			t.Errorf("device 3: %+v", d)
		}
		if !maps.Equal(d.Processes, map[int]int64{100: 7 * gib, 101: 0}) {
			t.Errorf("processes %v: one whose memory the driver does not tell has 0", d.Processes)
		}
		wantIll(t, w, nil)
		if n := strings.Count(logged(), "msg=device "); n != 8 {
			t.Errorf("%d devices in the log, want 8:\n%s", n, logged())
		}
		if d := all[4]; d.Temperature != 0 || d.Power != 0 || d.Fault.Kind != Healthy {
			t.Errorf("device 4, which does not tell: %+v", d)
		}
		f.set(func() { g.used, g.busy, g.celsius = 0, 0, 0 })
		look()
		if d := w.Devices()[3]; d.Used != 0 || d.Utilisation != 0 || d.Temperature != 0 || d.Power != 61.5 {
			t.Errorf("device 3 a look later: %+v", d)
		}
		w.Close()
		if f.inits != 1 || f.shut != 1 {
			t.Errorf("the library was opened %d and closed %d times, want once", f.inits, f.shut)
		}
	})
}

// TestLookReadsAtOnce checks that Look sees a change at once, before the next periodic look.
func TestLookReadsAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		w, _ := open(t, f, "all")
		f.set(func() { f.gpus[2].used = 5 * gib })
		before := time.Now()
		if err := w.Look(t.Context()); err != nil || w.Devices()[2].Used != 5*gib || time.Since(before) > 0 {
			t.Errorf("error %v, after %v %+v", err, time.Since(before), w.Devices()[2])
		}
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		w.Close()
		if err := w.Look(t.Context()); err != nil {
			t.Errorf("of a watch that has ended: %v", err)
		}
		none := Open(Config{Share: Share{none: true}})
		defer none.Close()
		if err := none.Look(ended); err != nil && !errors.Is(err, context.Canceled) {
			t.Errorf("of a share without devices: %v", err)
		}
	})
}

// TestMissingFunctionsAreNotCalled has a library that lacks functions. A call to one of them would
// end the process.
func TestMissingFunctionsAreNotCalled(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		f.LookupSymbolFunc = func(string) error { return nvml.ERROR_FUNCTION_NOT_FOUND }
		for _, g := range f.gpus {
			// A call to one of these functions panics.
			g.GetMemoryInfo_v2Func, g.GetRemappedRowsFunc, g.GetMigModeFunc = nil, nil, nil
			g.GetTemperatureFunc, g.GetPowerUsageFunc = nil, nil
			g.MemoryInfo.Used = gib
		}
		w, _ := open(t, f, "")
		if all := w.Devices(); len(all) != 8 || all[0].Memory != 40*gib || all[0].Used != gib {
			t.Errorf("%+v", all)
		}
		wantIll(t, w, nil)
	})
}

func TestOnlyDevicesOfTheShareAreReported(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		f.gpus[0].UUID, f.gpus[1].UUID = "GPU-00", "GPU-01"
		f.open(f.gpus[0])
		f.open(f.gpus[1])
		f.divide(f.gpus[1], "MIG-0a", "", "MIG-0c")
		for share, want := range map[string][]string{
			"0":           {"0"},
			"7, 0":        {"0", "7"},
			"GPU-00":      {"0"},
			"1":           {"1:0", "1:2"},
			"GPU-01":      {"1:0", "1:2"},
			"1:2,GPU-00":  {"0", "1:2"},
			"MIG-0a":      {"1:0"},
			"none":        nil,
			"all":         {"0", "1:0", "1:2", "2", "3", "4", "5", "6", "7"},
			"9,GPU-ff,1:": nil,
		} {
			if _, err := ParseShare(share); err != nil {
				if share != "9,GPU-ff,1:" || !strings.Contains(err.Error(), "want all, none") {
					t.Errorf("%s: %v", share, err)
				}
				continue
			}
			w, _ := open(t, f, share)
			var got []string
			for _, d := range w.Devices() {
				got = append(got, d.Index)
			}
			if !slices.Equal(got, want) {
				t.Errorf("share %s: devices %v, want %v", share, got, want)
			}
			w.Close()
		}
		w, logged := open(t, f, "GPU-ee")
		if len(w.Devices()) > 0 || !strings.Contains(logged(), "no such device; it is used once it appears\" device=GPU-ee") {
			t.Errorf("a device that is not there: %v, log %s", w.Devices(), logged())
		}
	})
}

func TestInstancesOfADividedGPUAreDevices(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		f.divide(f.gpus[2], "MIG-a", "", "MIG-c")
		w, _ := open(t, f, "2")
		all := w.Devices()
		if len(all) != 2 || all[0].UUID != "MIG-a" || all[0].Memory != 5*gib || all[0].Utilisation != unknown || all[1].Index != "2:2" ||
			!strings.HasSuffix(all[1].Name, "MIG 1g.5gb") {
			t.Fatalf("%+v, want two instances", all)
		}
		f.xid(f.gpus[2], 94, 7) // of the first instance alone
		look()
		wantIll(t, w, map[string]string{"2:0": "XID 94"})
		f.set(func() { f.gpus[2].ecc = 3 })
		look()
		wantIll(t, w, map[string]string{"2:0": "3 uncorrected", "2:2": "3 uncorrected"})
		f.set(func() { f.gpus[2].ecc = 0 })
		f.divide(f.gpus[2], "MIG-d")
		look()
		if got := uuids(w.Devices()); !slices.Equal(got, []string{"MIG-d"}) {
			t.Errorf("divided anew: %v", got)
		}
		f.set(func() { f.gpus[2].MigMode = nvml.DEVICE_MIG_DISABLE })
		look()
		if got := uuids(w.Devices()); !slices.Equal(got, []string{f.gpus[2].UUID}) {
			t.Errorf("whole again: %v", got)
		}
	})
}

func TestLostDevicesRecover(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		f.divide(f.gpus[5], "MIG-x", "MIG-y")
		w, logged := open(t, f, "all")
		before := uuids(w.Devices())
		f.set(func() { f.gpus[4].lost, f.gpus[5].lost = true, true })
		look()
		wantIll(t, w, map[string]string{"4": "it is lost", "5:0": "it is lost", "5:1": "it is lost"})
		if got := uuids(w.Devices()); !slices.Equal(got, before) {
			t.Errorf("devices %v, want all that there were: %v", got, before)
		}
		if !strings.Contains(logged(), "device is unhealthy and not used until it recovers\" index=4") {
			t.Errorf("log: %s", logged())
		}
		time.Sleep(time.Minute)
		wantIll(t, w, map[string]string{"4": "it is lost", "5:0": "it is lost", "5:1": "it is lost"})
		f.set(func() {
			if f.inits < 2 || f.inits > 4 {
				t.Errorf("the library was opened %d times in a minute, want every half minute", f.inits)
			}
			if f.watching == 0 {
				t.Error("errors are not watched any more")
			}
			f.gpus[4].lost, f.gpus[5].lost = false, false
		})
		look()
		wantIll(t, w, nil)
		if n := strings.Count(logged(), "device is healthy again"); n != 3 {
			t.Errorf("%d devices are healthy again in the log, want 3:\n%s", n, logged())
		}
	})
}

func TestFaultsMakeADeviceUnhealthy(t *testing.T) {
	for name, tc := range map[string]struct {
		break_ func(g *gpu)
		why    string
	}{
		"ECC":              {func(g *gpu) { g.ecc = 2 }, "2 uncorrected memory errors"},
		"remap pending":    {func(g *gpu) { g.pending = true }, "waits to be remapped"},
		"remap failed":     {func(g *gpu) { g.failed, g.pending = true, true }, "could not be remapped"},
		"reset required":   {func(g *gpu) { g.asked = nvml.ERROR_RESET_REQUIRED }, "has to be reset"},
		"driver's trouble": {func(g *gpu) { g.asked = nvml.ERROR_UNKNOWN }, "cannot be read"},
		"without ECC":      {func(g *gpu) { g.asked = nvml.ERROR_NOT_SUPPORTED }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, f *fleet) {
				w, _ := open(t, f, "all")
				wantIll(t, w, nil)
				f.set(func() { tc.break_(f.gpus[6]) })
				look()
				if tc.why == "" {
					wantIll(t, w, nil)
				} else {
					wantIll(t, w, map[string]string{"6": tc.why})
				}
				f.set(func() { g := f.gpus[6]; g.ecc, g.pending, g.failed, g.asked = 0, false, false, 0 })
				look()
				wantIll(t, w, nil)
			})
		})
	}
}

func TestCriticalErrorsQuarantineADevice(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		w, _ := open(t, f, "all")
		f.xid(f.gpus[1], 31, anyInstance) // a program's own page fault
		f.xid(f.gpus[2], 79, anyInstance)
		look()
		wantIll(t, w, map[string]string{"2": "XID 79"})
		time.Sleep(quarantine / 2)
		f.xid(f.gpus[2], 48, anyInstance)
		look()
		time.Sleep(quarantine / 2)
		synctest.Wait()
		wantIll(t, w, map[string]string{"2": "XID 48"})
		time.Sleep(quarantine / 2)
		look()
		wantIll(t, w, nil)
	})
}

func TestDevicesAreUnhealthyWhileNVMLHangs(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		w, logged := open(t, f, "0,1")
		hang := make(chan struct{})
		f.set(func() { f.hang = hang })
		time.Sleep(3 * time.Second) // it begins to look
		time.Sleep(9 * time.Second)
		wantIll(t, w, nil)
		time.Sleep(2 * time.Second)
		wantIll(t, w, map[string]string{"0": "NVML has not answered for 11s", "1": "NVML has not answered"})
		if !strings.Contains(logged(), "NVML does not answer") {
			t.Errorf("log: %s", logged())
		}
		f.set(func() { f.hang = nil })
		close(hang)
		look()
		wantIll(t, w, nil)

		hang = make(chan struct{})
		f.set(func() { f.hang = hang })
		look()
		begin := time.Now()
		w.Close()
		if d := time.Since(begin); d > 11*time.Second || !strings.Contains(logged(), "abandoned") {
			t.Errorf("a watch whose library hangs was closed after %v, log %s", d, logged())
		}
		close(hang)
	})
}

func TestOpenReturnsWhileNVMLHangs(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		hang := make(chan struct{})
		f.hang = hang
		w, _ := open(t, f, "0")
		if got := w.Devices(); len(got) > 0 {
			t.Errorf("%v", got)
		}
		f.set(func() { f.hang = nil })
		close(hang)
		look()
		if got := w.Devices(); len(got) != 1 {
			t.Errorf("%v, want device 0", got)
		}
	})
}

func TestNoLibraryMeansNoDevices(t *testing.T) {
	for ret, want := range map[nvml.Return]string{
		nvml.ERROR_LIBRARY_NOT_FOUND: "level=INFO msg=\"no devices: this machine has no NVIDIA driver\"\n",
		nvml.ERROR_DRIVER_NOT_LOADED: "level=WARN msg=\"no devices: NVML does not start\" error=",
	} {
		bubble(t, func(t *testing.T, f *fleet) {
			f.fails = ret
			w, logged := open(t, f, "GPU-aa")
			if len(w.Devices()) > 0 || !strings.Contains(logged(), want) || strings.Count(logged(), "\n") != 1 {
				t.Errorf("devices %v, log %q, want one line with %q", w.Devices(), logged(), want)
			}
		})
	}
}

// TestRealLibraryIsNeverAnError opens the real library, which this machine may have or not.
func TestRealLibraryIsNeverAnError(t *testing.T) {
	w := Open(Config{Log: discard()})
	t.Logf("this machine has %+v", w.Devices())
	w.Close()
}

// TestOpeningTheLibraryIsRetried checks that devices are unhealthy while the library does not open
// again, and that opening is retried.
func TestOpeningTheLibraryIsRetried(t *testing.T) {
	bubble(t, func(t *testing.T, f *fleet) {
		w, _ := open(t, f, "0,1")
		f.set(func() { f.gpus[0].lost = true; f.fails = nvml.ERROR_UNKNOWN })
		time.Sleep(time.Minute)
		wantIll(t, w, map[string]string{"0": "NVML does not start", "1": "NVML does not start"})
		f.set(func() { f.gpus[0].lost = false; f.fails = nvml.SUCCESS })
		look()
		wantIll(t, w, nil)
	})
}

func FuzzParseShare(f *testing.F) {
	for _, s := range []string{"", "all", "none", "0,2", "1:0", "GPU-5f1c,MIG-00/1/2", "x", ",", "0,", "all,0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		share, err := ParseShare(s)
		if err != nil {
			return
		}
		if share.none || len(share.names) == 0 {
			if all := s == "" || s == "all"; !all && s != "none" || all == share.none || len(share.names) > 0 {
				t.Errorf("%q: read as %+v", s, share)
			}
			return
		}
		again, err := ParseShare(strings.Join(share.names, ","))
		if err != nil || again.none || !slices.Equal(again.names, share.names) {
			t.Errorf("%q: read as %+v, and that as %+v, %v", s, share, again, err)
		}
	})
}
