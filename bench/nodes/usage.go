package nodes

import (
	"fmt"
	"os"
	"runtime"
	"syscall"
	"time"
)

// usage is what a control plane has used since it began.
type usage struct {
	cpu                  time.Duration
	messages             uint64 // that its NATS server has received
	announcements, bytes int64
	allocated            uint64 // bytes
}

func (r *run) usage() usage {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // cannot fail
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	messages, _ := r.plane.nats.Messages()
	return usage{
		cpu: time.Duration(u.Utime.Nano() + u.Stime.Nano()), messages: messages,
		announcements: r.plane.bus.announcements.Load(), bytes: r.plane.bus.bytes.Load(), allocated: m.TotalAlloc,
	}
}

func (u usage) since(before usage) usage {
	return usage{u.cpu - before.cpu, u.messages - before.messages, u.announcements - before.announcements, u.bytes - before.bytes, u.allocated - before.allocated}
}

// resident returns how many bytes of memory this process has in RAM.
func resident() int64 {
	b, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		return 0
	}
	var size, pages int64
	_, _ = fmt.Sscan(string(b), &size, &pages)
	return pages * int64(os.Getpagesize())
}
