package gateway

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/queue"
	"github.com/stagecoach-serving/stagecoach/request/task"
)

// natsJournal is a Journal in an embedded NATS server.
type natsJournal struct{ *queue.Journal }

// Append implements Journal.
func (j natsJournal) Append(_ context.Context, e Entry) error {
	b, err := e.MarshalBinary()
	if err != nil {
		return err
	}
	return j.Journal.Append(e.Request.Target, e.Request.ID, b)
}

// openNATS returns a journal in an embedded server. died gets each new dead letter.
func openNATS(t *testing.T, died chan<- queue.DeadLetter) *queue.Journal {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	s, err := queue.StartServer(queue.ServerConfig{Dir: t.TempDir(), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	nc, err := s.Connect(t.Name())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	j, err := queue.OpenJournal(t.Context(), nc, queue.JournalConfig{Disk: s.Disk(), Blobs: t.TempDir(), Died: func(l queue.DeadLetter) { died <- l }}, log)
	if err != nil {
		t.Fatal(err)
	}
	return j
}

// callbackOf is what a callback's receiver has got.
type callbackOf struct {
	header http.Header
	body   string
}

// TestDroppedAsyncRequestBecomesADeadLetter sends async requests through a journal in NATS. A
// policy drops the first runs.
func TestDroppedAsyncRequestBecomesADeadLetter(t *testing.T) {
	for name, c := range map[string]struct {
		again bool  // annotation retry-dropped
		drops int32 // runs that are dropped
		runs  int32
		dead  int // attempts of the dead letter; 0: none
		told  int // status that the callback gets
	}{
		"final by default":         {false, 9, 1, 1, 503},
		"another run is not":       {true, 1, 2, 0, 200},
		"until no attempt is left": {true, 9, 3, 3, 503},
	} {
		t.Run(name, func(t *testing.T) {
			died, told := make(chan queue.DeadLetter, 9), make(chan callbackOf, 9)
			receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
				b, _ := io.ReadAll(r.Body) // a small body that has arrived
				told <- callbackOf{r.Header, string(b)}
			}))
			defer receiver.Close()
			j := openNATS(t, died)
			f := newFront(t, func(cfg *Config) { cfg.Journal = natsJournal{j} })
			var runs atomic.Int32
			var mu sync.Mutex
			arrivals := map[time.Time]bool{}
			f.invoker.f = func(_ context.Context, r task.Request) (*task.Response, *task.Error) {
				mu.Lock()
				arrivals[r.Arrived] = true
				mu.Unlock()
				if runs.Add(1) <= c.drops {
					return nil, lateError(http.StatusServiceUnavailable)
				}
				return echo(r), nil
			}
			ctx, stop := context.WithCancel(t.Context())
			var running sync.WaitGroup
			running.Go(func() {
				j.Run(ctx, f.work(t, Retry{Attempts: 3, Codes: []int{503}, Faults: true, Dropped: c.again, MaxWait: time.Millisecond}))
			})
			defer running.Wait()
			defer stop()
			if w := f.do(http.MethodPost, "/async-function/echo", "hello", "X-Callback-Url", receiver.URL, "Content-Type", "text/plain"); w.Code != http.StatusAccepted {
				t.Fatalf("status %d: %s", w.Code, w.Body)
			}
			got := <-told
			want := map[bool][2]string{true: {"late", "stage \"echo\": dropped (late): it is due in 1 ms\n"}, false: {"", "hello"}}[c.told == http.StatusServiceUnavailable]
			if got.header.Get("X-Function-Status") != strconv.Itoa(c.told) || got.header.Get("X-Dropped") != want[0] || got.body != want[1] {
				t.Errorf("the callback got %v %q, want status %d, dropped %q", got.header, got.body, c.told, want[0])
			}
			if n := runs.Load(); n != c.runs || len(arrivals) != 1 {
				t.Errorf("%d runs with arrivals %v, want %d with one", n, arrivals, c.runs)
			}
			if c.dead == 0 {
				if len(died) > 0 {
					t.Errorf("a dead letter: %+v", <-died)
				}
				return
			}
			l := <-died
			if l.Dropped != "late" || l.Attempts != c.dead || l.Kind != queue.Run || !strings.Contains(l.Cause, "dropped (late)") {
				t.Errorf("dead letter %+v, want one of %d attempts with the reason", l, c.dead)
			}
			if all, _, err := j.Dead(nil, "", 10); err != nil || len(all) != 1 || all[0].Dropped != "late" {
				t.Errorf("letters %+v, %v", all, err)
			}
		})
	}
}

// work returns the work of a journal: runs, and the delivery of their results.
func (f *front) work(t *testing.T, retry Retry) func(context.Context, queue.Record) queue.End {
	return func(ctx context.Context, r queue.Record) queue.End {
		try := Try{Attempt: r.Attempt, Redelivered: r.Redelivered}
		var end Ending
		if r.Kind == queue.Callback {
			var n Notice
			if err := n.UnmarshalBinary(r.Data); err != nil {
				t.Error(err)
			}
			end = f.cfg.Callbacks.Deliver(ctx, n, try)
		} else {
			var e Entry
			if err := e.UnmarshalBinary(r.Data); err != nil {
				t.Error(err)
			}
			end = f.Work(ctx, e, try, retry)
		}
		out := queue.End{Err: end.Err, Again: end.Again, After: end.After, Busy: end.Busy, Dropped: string(end.Dropped)}
		if end.Notice != nil {
			b, err := end.Notice.MarshalBinary()
			if err != nil {
				t.Error(err)
			}
			out.Callback, out.To = b, end.Notice.Host()
		}
		return out
	}
}
