package control

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/autoscaler/record"
)

// Decision is a decision with all its inputs. What it points to never changes.
type Decision struct {
	Policies policy.Names
	Snapshot plan.Snapshot
	Memory   policy.Memory // memory before the decision
	Plan     plan.Plan
	Err      error           // there is no plan to apply
	Traffic  *record.Traffic // since the previous decision; nil: it is not counted
}

// Recorder gets every decision. Record must not block.
type Recorder interface{ Record(d Decision) }

// line encodes d with a newline.
func (d Decision) line() ([]byte, error) {
	memory, err := d.Memory.MarshalJSON()
	if err == nil {
		r := record.Line{
			Version: record.Version, Policies: d.Policies, Snapshot: d.Snapshot, Memory: memory, Plan: d.Plan, Error: firstLine(d.Err), Traffic: d.Traffic,
		}
		var b []byte
		if b, err = json.Marshal(r); err == nil {
			return append(b, '\n'), nil
		}
	}
	return nil, fmt.Errorf("decision on snapshot %d: %w", d.Snapshot.Rev, err)
}

// firstLine returns the error without a panic's stack, which differs in each run.
func firstLine(err error) string {
	if err == nil {
		return ""
	}
	line, _, _ := strings.Cut(err.Error(), "\n")
	return line
}

// firstLines joins the first lines of the errors in err.
func firstLines(err error) string {
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return firstLine(err)
	}
	var lines []string
	for _, e := range joined.Unwrap() {
		lines = append(lines, firstLine(e))
	}
	return strings.Join(lines, "; ")
}

// recordQueue is how many decisions may wait to be written. Further ones are dropped.
const recordQueue = 64

// RecordFile is a Recorder that appends to a file; [OpenRecord] opens one. When the file reaches
// half of the limit, it is renamed to FILE.1, which replaces the previous FILE.1, and a new file is
// started. Decisions that come too fast or cannot be written are dropped and counted. Each series
// of drops is logged once.
type RecordFile struct {
	path  string
	limit int64 // bytes of both files
	log   *slog.Logger
	drops *prometheus.CounterVec

	queue chan Decision
	done  chan struct{}
	stop  sync.Once
	ended chan struct{} // closed when nothing more will be written

	file   *os.File // this and the fields below belong to the owner goroutine
	size   int64
	failed bool // the latest decision could not be written, which was logged

	mu   sync.Mutex
	lost int // decisions dropped because the queue was full, since the latest one that fit
}

// OpenRecord opens a record that takes at most limit bytes on disk, and appends to it. It fails if
// another process has the file open for recording.
func OpenRecord(path string, limit int64, log *slog.Logger, reg prometheus.Registerer) (*RecordFile, error) {
	r := newRecordFile(path, limit, log)
	if err := r.open(); err != nil {
		return nil, err
	}
	if err := reg.Register(r.drops); err != nil {
		return nil, errors.Join(fmt.Errorf("control: %w", err), r.file.Close())
	}
	go r.own()
	return r, nil
}

func newRecordFile(path string, limit int64, log *slog.Logger) *RecordFile {
	r := &RecordFile{
		path: path, limit: limit, log: log, queue: make(chan Decision, recordQueue), done: make(chan struct{}), ended: make(chan struct{}),
		drops: prometheus.NewCounterVec(prometheus.CounterOpts{
			Namespace: "stagecoach", Subsystem: "control", Name: "record_dropped_total",
			Help: "Decisions that are not in the record: queue (they came too fast), write (they could not be written).",
		}, []string{"reason"}),
	}
	for _, reason := range []string{"queue", "write"} {
		r.drops.WithLabelValues(reason) // creates the series with 0
	}
	return r
}

// Record implements [Recorder].
func (r *RecordFile) Record(d Decision) {
	select {
	case <-r.done:
		return
	default:
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	select {
	case r.queue <- d:
		if r.lost > 0 {
			r.log.Warn("decisions are recorded again", "dropped", r.lost)
			r.lost = 0
		}
	default:
		r.drops.WithLabelValues("queue").Inc()
		if r.lost++; r.lost == 1 {
			r.log.Warn("decisions are dropped: they come faster than they can be written", "record", r.path)
		}
	}
}

// Close writes the queued decisions and closes the file. Later ones are dropped.
func (r *RecordFile) Close() error {
	r.stop.Do(func() { close(r.done) })
	<-r.ended
	if r.file == nil {
		return nil
	}
	if err := r.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return fmt.Errorf("record: %w", err)
	}
	return nil
}

// own writes until Close.
func (r *RecordFile) own() {
	defer close(r.ended)
	for {
		select {
		case d := <-r.queue:
			r.take(d)
			continue
		case <-r.done:
		}
		for {
			select {
			case d := <-r.queue:
				r.take(d)
				continue
			default:
			}
			return
		}
	}
}

// take writes a decision. It logs when writing begins to fail, and when it works again.
func (r *RecordFile) take(d Decision) {
	line, err := d.line()
	if err == nil {
		err = r.write(line)
	}
	if err != nil {
		r.drops.WithLabelValues("write").Inc()
	}
	switch failed := err != nil; {
	case failed && !r.failed:
		r.log.Error("decisions are not recorded", "record", r.path, "error", err)
	case !failed && r.failed:
		r.log.Info("decisions are recorded again", "record", r.path)
	}
	r.failed = err != nil
}

// write appends a line, to the next file if this one is full. It removes a partly written line.
func (r *RecordFile) write(line []byte) error {
	if int64(len(line)) > r.limit/2 {
		return fmt.Errorf("a decision of %s, want at most %s", plan.Size(int64(len(line))), plan.Size(r.limit/2))
	}
	if r.file != nil && r.size+int64(len(line)) > r.limit/2 {
		err := os.Rename(r.path, r.path+".1")
		err = errors.Join(err, r.file.Close())
		r.file = nil
		if err != nil && !errors.Is(err, os.ErrNotExist) { // another process may have removed it
			return err
		}
	}
	if r.file == nil {
		if err := r.open(); err != nil {
			return err
		}
	}
	n, err := r.file.Write(line)
	if err != nil && n > 0 {
		err = errors.Join(err, r.file.Truncate(r.size))
		n = 0
	}
	r.size += int64(n)
	return err
}

// open opens the file at its end. It terminates a line that a crash cut short, so that the next
// line is complete.
func (r *RecordFile) open() error {
	f, err := os.OpenFile(r.path, os.O_CREATE|os.O_RDWR|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("record: %w", err)
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return errors.Join(fmt.Errorf("record: another process records in %s (%w); stop it, or choose another file", r.path, err), f.Close())
	}
	r.file = f
	if r.size, err = f.Seek(0, io.SeekEnd); err == nil && r.size > 0 {
		last := []byte{0}
		if _, err = f.ReadAt(last, r.size-1); err == nil && last[0] != '\n' {
			var n int
			n, err = f.Write([]byte("\n"))
			r.size += int64(n)
		}
	}
	if err != nil {
		r.file = nil
		return errors.Join(fmt.Errorf("record: %w", err), f.Close())
	}
	return nil
}
