// Command batches is a stage for tests of batches. It answers each call with the number of calls in
// its batch and the call's input. A batch takes a moment, in which other calls gather. Inputs change
// what it does:
//
//   - "poison …" ends the process with exit status 3
//   - "eat N …" takes N MiB of memory for as long as the batch runs, beside what its other calls take
package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/stagecoach-serving/stagecoach/stage"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// half is half of the time that a batch takes. A poison ends the process between the halves.
const half = 15 * time.Millisecond

func main() {
	stage.Main(stage.Hooks{Slots: 2, MaxBatch: 32, Infer: infer})
}

func infer(_ context.Context, calls []*stage.Call) []stage.Result {
	time.Sleep(half)
	mib := 0
	for _, c := range calls {
		text, n := input(c), 0
		if strings.HasPrefix(text, "poison") {
			fmt.Fprintln(os.Stderr, "batches: this input ends the process")
			os.Exit(3)
		}
		_, _ = fmt.Sscanf(text, "eat %d", &n)
		mib += n
	}
	if err := eat(mib << 20); err != nil {
		fmt.Fprintln(os.Stderr, "batches:", err)
		os.Exit(4)
	}
	time.Sleep(half)
	out := make([]stage.Result, len(calls))
	for i, c := range calls {
		out[i].Output = tensor.Activation{{ContentType: "text/plain", Bytes: fmt.Append(nil, len(calls), " ", input(c))}}
	}
	return out
}

func input(c *stage.Call) string { return string(c.Items()[0].Bytes) }

// eat uses memory and gives it back to the kernel.
func eat(bytes int) error {
	if bytes == 0 {
		return nil
	}
	b, err := syscall.Mmap(-1, 0, bytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		return err
	}
	for i := 0; i < len(b); i += 4096 {
		b[i] = 1
	}
	return syscall.Munmap(b)
}
