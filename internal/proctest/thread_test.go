package proctest

import (
	"os/exec"
	"sync"
	"syscall"
	"testing"
)

// TestStartedProcessesOutliveThreads starts processes, some of them from goroutines whose threads
// then end. All of them still run.
func TestStartedProcessesOutliveThreads(t *testing.T) {
	var all []*exec.Cmd
	for range 8 {
		cmd := exec.Command("sleep", "600")
		OnThread(func() {
			if err := Start(cmd); err != nil {
				t.Error(err)
			}
		})
		if cmd.Process == nil {
			continue
		}
		all = append(all, cmd)
		t.Cleanup(func() {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		})
	}
	var wg sync.WaitGroup
	for range 64 { // end the threads that the runtime keeps for later
		wg.Go(func() { OnThread(func() {}) })
	}
	wg.Wait()
	for i, cmd := range all {
		var status syscall.WaitStatus
		if pid, err := syscall.Wait4(cmd.Process.Pid, &status, syscall.WNOHANG, nil); err != nil || pid != 0 {
			t.Errorf("process %d: %v, it ended with signal %d, want it to run", i, err, status.Signal())
		}
	}
}
