package conformance

import (
	"log/slog"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/stagecoach-serving/stagecoach/keysmanager/cgroup"
	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/sandbox"
)

// TestDeviceMemoryOfAProgramCountsAsItsWatchdogs checks that the device memory of a program counts
// as that of the process whose cgroup it is in, even if it descends from containerd.
func TestDeviceMemoryOfAProgramCountsAsItsWatchdogs(t *testing.T) {
	each(t, func(t *testing.T, r rig) {
		groups, err := cgroup.Open("conformance-" + r.name)
		if err != nil {
			t.Skip(err)
		}
		defer groups.Close()
		watchdogs := sandbox.NewSpawner()
		defer watchdogs.Close()
		var watchdog [2]sandbox.Process
		var program [2]running
		for i, name := range []string{"first", "second"} {
			g, err := groups.Create(name, cgroup.Limits{})
			if err != nil {
				t.Fatal(err)
			}
			files, err := g.Files()
			if err != nil {
				t.Fatal(err)
			}
			if watchdog[i], err = watchdogs.Start(t.Context(), sandbox.Command{Dir: "/", Argv: []string{"sleep", "600"}, Groups: files}); err != nil {
				t.Fatal(err)
			}
			c := r.beside(image(t), "wait")
			c.Groups = files
			program[i] = r.start(t, c)
			program[i].awaitLine(t)
			resources.CloseFiles(files)
			defer func() { // before groups is closed
				_, _ = watchdog[i].Signal(unix.SIGKILL), program[i].Signal(unix.SIGKILL)
				watchdog[i].Wait()
				program[i].end()
				if err := g.Remove(); err != nil {
					t.Error(err)
				}
			}()
		}
		const gib = int64(1 << 30)
		seen := resources.Device{ID: "GPU-a", Memory: 40 * gib, Used: 12 * gib, Processes: map[int]int64{program[0].PID(): 6 * gib, program[1].PID(): 4 * gib, 1: 2 * gib}}
		pool := resources.NewPool(resources.Config{Devices: func() []resources.Device { return []resources.Device{seen} }, Log: slog.Default()})
		holders := func(first, second int64) (all []resources.Holder) {
			for i, bytes := range []int64{first, second} {
				all = append(all, resources.Holder{Replica: "r", PID: watchdog[i].PID(), Reserved: map[string]int64{"GPU-a": bytes * gib}})
			}
			return all
		}
		for want, given := range map[int64][]resources.Holder{28: holders(6, 4), 24: holders(10, 4), 22: holders(6, 10)} {
			if got := pool.Devices(given)[0].Free; got != want*gib {
				t.Errorf("%d bytes free, want %d GiB", got, want)
			}
		}
	})
}
