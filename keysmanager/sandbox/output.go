package sandbox

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

// MaxLine is the maximum length of a line of output, in bytes. The rest of a longer line is
// dropped.
const MaxLine = 8 << 10

// Output is the reading end of a process's stdout and stderr.
type Output struct {
	Stdout, Stderr *os.File // the writing ends, for the process; Started closes them

	ours  []*os.File // the reading ends
	lines sync.WaitGroup

	mu       sync.Mutex
	last     string // non-empty line on stderr, or reason if crashed
	reason   string // latest line that a Go program prints before the stacks of a crash
	crashed  bool   // a stack followed reason
	throttle throttle
}

// NewOutput creates the pipes and calls sink with each line, from two goroutines, until all copies
// of the writing ends are closed. If a process prints too much, lines are dropped, and a line on
// stderr says so (see LinesPerSecond). The caller must call Finish or Abandon.
func NewOutput(sink func(stream, line string)) (*Output, error) {
	o := &Output{}
	for _, p := range []struct {
		stream string
		write  **os.File
	}{{"stdout", &o.Stdout}, {"stderr", &o.Stderr}} {
		r, w, err := os.Pipe()
		if err != nil {
			o.Started()
			o.Abandon()
			return nil, fmt.Errorf("pipe for %s: %w", p.stream, err)
		}
		*p.write = w
		o.listen(p.stream, r, sink)
	}
	return o, nil
}

// ResumeOutput continues an Output that another process has stopped reading. stdout and stderr are
// the reading ends of its pipes. ResumeOutput owns them from then on.
func ResumeOutput(stdout, stderr *os.File, sink func(stream, line string)) *Output {
	o := &Output{}
	o.listen("stdout", stdout, sink)
	o.listen("stderr", stderr, sink)
	return o
}

// Readers returns the reading ends of stdout and stderr.
func (o *Output) Readers() []*os.File { return o.ours }

func (o *Output) listen(stream string, r *os.File, sink func(stream, line string)) {
	o.ours = append(o.ours, r)
	o.lines.Go(func() {
		readLines(r, func(line string) {
			if o.admit(stream, line, sink) {
				sink(stream, line)
			}
		})
		o.mu.Lock()
		dropped := o.throttle.dropped
		o.throttle.dropped = 0
		o.mu.Unlock()
		tellDropped(dropped, sink)
	})
}

// admit counts a line and reports whether it is passed on.
func (o *Output) admit(stream, line string, sink func(stream, line string)) bool {
	o.mu.Lock()
	if stream == "stderr" && strings.TrimSpace(line) != "" {
		o.note(line)
	}
	ok, first, dropped := o.throttle.pass(time.Now(), len(line))
	o.mu.Unlock()
	if first {
		sink("stderr", fmt.Sprintf("stagecoach: lines are dropped from here on: it prints more than %d lines or %d bytes a second", LinesPerSecond, BytesPerSecond))
	}
	tellDropped(dropped, sink)
	return ok
}

func tellDropped(n int, sink func(stream, line string)) {
	if n > 0 {
		sink("stderr", fmt.Sprintf("stagecoach: %d lines were dropped here", n))
	}
}

// Started closes this process's copies of the writing ends. The caller calls it once the new
// process has its own copies, or will never start.
func (o *Output) Started() {
	for _, f := range []*os.File{o.Stdout, o.Stderr} {
		if f != nil {
			_ = f.Close()
		}
	}
}

// Finish returns when all lines are delivered, which is when all copies of the writing ends are
// closed. After limit, it stops reading and returns.
func (o *Output) Finish(limit time.Duration) {
	t := time.AfterFunc(limit, o.close)
	defer t.Stop()
	o.lines.Wait()
	o.close()
}

// Abandon stops reading.
func (o *Output) Abandon() {
	o.close()
	o.lines.Wait()
}

func (o *Output) close() {
	for _, r := range o.ours {
		_ = r.Close() // nothing is written through it
	}
}

// note keeps a line of stderr as the last one. A Go program that crashes prints its reason and then
// the stacks of its goroutines. In that case note keeps the reason.
func (o *Output) note(line string) {
	if o.crashed {
		return
	}
	o.last = line
	switch {
	case strings.HasPrefix(line, "panic: "), strings.HasPrefix(line, "fatal error: "):
		o.reason = line
	case o.reason != "" && (strings.HasPrefix(line, "goroutine ") || strings.HasPrefix(line, "runtime stack:")):
		o.crashed, o.last = true, o.reason
	}
}

// LastError returns the last line on stderr that was not empty. If a Go program crashed, LastError
// returns the line with the reason, which is above the stacks.
func (o *Output) LastError() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.last
}

func readLines(r io.Reader, f func(string)) {
	b := bufio.NewReaderSize(r, MaxLine)
	var p pace
	look := func() (line []byte, err error) {
		line, err = b.ReadSlice('\n')
		if d := p.pause(time.Now(), len(line)); d > 0 {
			time.Sleep(d)
		}
		return line, err
	}
	for {
		line, err := look()
		if len(line) > 0 {
			f(strings.TrimRight(string(line), "\r\n"))
		}
		for errors.Is(err, bufio.ErrBufferFull) { // drop the rest of a line that is too long
			_, err = look()
		}
		if err != nil {
			return
		}
	}
}
