package queue

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
)

// openCluster connects to a cluster of a test.
func openCluster(t *testing.T, of *natstest.Cluster, replicas int) (*Cluster, *nats.Conn) {
	t.Helper()
	c, err := OpenCluster(t.Context(), ClusterConfig{URLs: of.URLs(), Replicas: replicas, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	nc, err := c.Connect(t.Name())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	disks.Store(nc, c.Disk())
	return c, nc
}

// runs counts the runs of each record, and which of them were marked as possible repetitions.
type runs struct {
	mu   sync.Mutex
	all  map[string]int
	told map[string]int
}

func (r *runs) work(_ context.Context, rec Record) End {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all[rec.ID]++
	if rec.Redelivered {
		r.told[rec.ID]++
	}
	return End{}
}

// TestClusterKeepsRecordsWhileServersDie appends records without a pause while one of three servers
// is killed and started again, and then while two are. No accepted record is lost, and each runs
// once. While two servers are away, records are refused with ErrStopped and the cluster's name.
func TestClusterKeepsRecordsWhileServersDie(t *testing.T) {
	of := natstest.Start(t, 3)
	c, nc := openCluster(t, of, 0)
	if c.Replicas() != 3 {
		t.Fatalf("streams have %d copies, want 3", c.Replicas())
	}
	j := openJournal(t, nc, JournalConfig{})
	ran := &runs{all: map[string]int{}, told: map[string]int{}}
	work(t, j, ran.work)

	var mu sync.Mutex
	var accepted []string
	var refusals []error
	stop := make(chan struct{})
	var senders sync.WaitGroup
	for s := range 4 {
		senders.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-stop:
					return
				case <-time.After(5 * time.Millisecond):
				}
				id, data := fmt.Sprintf("%d-%d", s, i), "x"
				if i%50 == 0 {
					data = strings.Repeat("x", blobAbove+1)
				}
				err := j.Append("f", id, []byte(data))
				mu.Lock()
				if err == nil {
					accepted = append(accepted, id)
				} else {
					refusals = append(refusals, err)
				}
				mu.Unlock()
			}
		})
	}
	more := func(what string) {
		t.Helper()
		mu.Lock()
		from := len(accepted)
		mu.Unlock()
		until(t, what, func() bool { mu.Lock(); defer mu.Unlock(); return len(accepted) > from+50 })
	}
	more("records to be accepted")
	of.Kill(1)
	more("two servers to accept records")
	of.Run(1)
	more("three servers to accept records")
	of.Kill(0)
	of.Kill(2)
	until(t, "one server alone to refuse records", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return slices.ContainsFunc(refusals, func(err error) bool {
			return errors.Is(err, ErrStopped) && strings.Contains(err.Error(), c.URL())
		})
	})
	until(t, "the journal to be degraded", func() bool { return errors.Is(c.Disk().Degraded(), ErrStopped) && c.Disk().Stats().Stopped })
	of.Run(0)
	of.Run(2)
	more("records to be accepted again")
	close(stop)
	senders.Wait()
	until(t, "an empty journal", func() bool { return len(j.Stats().Pending) == 0 })

	mu.Lock()
	defer mu.Unlock()
	ran.mu.Lock()
	defer ran.mu.Unlock()
	for _, id := range accepted {
		if n := ran.all[id]; n != 1+ran.told[id] {
			t.Errorf("record %s ran %d times, %d of them marked as repetitions", id, n, ran.told[id])
		}
	}
	for _, err := range refusals {
		if !errors.Is(err, ErrStopped) && !errors.Is(err, nats.ErrReconnectBufExceeded) {
			t.Errorf("refused with %v, want ErrStopped", err)
		}
	}
	t.Logf("%d accepted, %d refused", len(accepted), len(refusals))
}

// TestSmallClusterKeepsOneCopy checks that a single server outside is used with one copy per
// stream, unless more are asked for.
func TestSmallClusterKeepsOneCopy(t *testing.T) {
	of := natstest.Start(t, 1)
	c, nc := openCluster(t, of, 0)
	if c.Replicas() != 1 {
		t.Errorf("%d copies, want 1", c.Replicas())
	}
	kv, err := OpenKV(t.Context(), nc, c.Disk(), "functions")
	if err != nil {
		t.Fatal(err)
	}
	rev, err := kv.Replace(t.Context(), "a", []byte("1"), 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kv.Replace(t.Context(), "a", []byte("2"), 0); !errors.Is(err, ErrConflict) {
		t.Errorf("a second create: %v, want ErrConflict", err)
	}
	if _, err = kv.Replace(t.Context(), "a", []byte("2"), rev); err != nil {
		t.Error(err)
	}
	if _, err := kv.Replace(t.Context(), "a", []byte("3"), rev); !errors.Is(err, ErrConflict) {
		t.Errorf("an old revision: %v, want ErrConflict", err)
	}
	_, err = OpenCluster(t.Context(), ClusterConfig{URLs: of.URLs(), Replicas: 3, Log: slog.New(slog.DiscardHandler)})
	if err == nil || !strings.Contains(err.Error(), "nats.replicas: 3 servers") {
		t.Errorf("three copies on one server: %v", err)
	}
}

// onLog calls itself with each message that is logged.
type onLog func(message string)

func (f onLog) Enabled(context.Context, slog.Level) bool { return true }
func (f onLog) WithAttrs([]slog.Attr) slog.Handler       { return f }
func (f onLog) WithGroup(string) slog.Handler            { return f }
func (f onLog) Handle(_ context.Context, r slog.Record) error {
	f(r.Message)
	return nil
}

// TestStartWaitsForServers starts the server once OpenCluster says that it waits for it.
func TestStartWaitsForServers(t *testing.T) {
	t.Parallel()
	of := natstest.Start(t, 1)
	of.Kill(0)
	log := slog.New(slog.DiscardHandler)
	if _, err := OpenCluster(t.Context(), ClusterConfig{URLs: of.URLs(), Log: log}); !errors.Is(err, errAway) {
		t.Fatalf("without a server: %v, want errAway", err)
	}
	waits := slog.New(onLog(func(message string) {
		if message == "waiting for NATS" {
			of.Run(0)
		}
	}))
	c, err := OpenCluster(t.Context(), ClusterConfig{URLs: of.URLs(), Wait: time.Minute, Log: waits})
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

// TestFullClusterRefusesRecords fills the disk of a server outside. Records are refused with
// ErrStopped and the cluster's name. After the server got room and was started again, no accepted
// record is lost.
func TestFullClusterRefusesRecords(t *testing.T) {
	t.Parallel() // waits for appendTimeout
	dir := proctest.Disk(t, "64m")
	of := natstest.StartIn(t, dir)
	c, nc := openCluster(t, of, 0)
	j := openJournal(t, nc, JournalConfig{})
	free := proctest.Fill(t, dir, 4<<20)
	accepted := 0
	var err error
	for accepted < 100 {
		if err = j.Append("f", fmt.Sprint(accepted), make([]byte, 100<<10)); err != nil {
			break
		}
		accepted++
	}
	if !errors.Is(err, ErrStopped) || !strings.Contains(err.Error(), c.URL()) || accepted == 0 {
		t.Fatalf("after %d records: %v, want ErrStopped", accepted, err)
	}
	free()
	of.Kill(0)
	of.Run(0)
	ran := &runs{all: map[string]int{}, told: map[string]int{}}
	work(t, j, ran.work)
	until(t, "room", func() bool { return j.Append("f", "last", []byte("x")) == nil })
	until(t, "an empty journal", func() bool { return len(j.Stats().Pending) == 0 })
	ran.mu.Lock()
	defer ran.mu.Unlock()
	for i := range accepted {
		if n := ran.all[fmt.Sprint(i)]; n != 1 {
			t.Errorf("record %d ran %d times, want once", i, n)
		}
	}
}

func TestOldServersAreRefused(t *testing.T) {
	for version, want := range map[string]bool{"2.11.9": true, "2.12.0": false, "2.12.0-RC.1": false, "2.13.1": false, "3.0.0": false, "1.99.0": true, "": true} {
		if err := tooOld("nats://a", version); (err != nil) != want {
			t.Errorf("version %q: %v, want an error: %v", version, err, want)
		} else if err != nil && (!strings.Contains(err.Error(), MinServer) || !strings.Contains(err.Error(), version)) {
			t.Errorf("version %q: %v, want both versions named", version, err)
		}
	}
}

// lateDialer connects to a server. On its first connection, the server seems not to answer in time.
type lateDialer struct{ dials int }

type lateConn struct{ net.Conn }

func (lateConn) Read([]byte) (int, error) { return 0, os.ErrDeadlineExceeded }

func (d *lateDialer) Dial(network, address string) (net.Conn, error) {
	conn, err := net.Dial(network, address)
	if d.dials++; d.dials == 1 && err == nil {
		return lateConn{conn}, nil
	}
	return conn, err
}

// TestServersMayAnswerLate connects to a server that does not answer the first connection.
func TestServersMayAnswerLate(t *testing.T) {
	d := &lateDialer{}
	url := natstest.Start(t, 1).URLs()[0]
	nc, err := dial(url, nats.SetCustomDialer(d), nats.Timeout(waitLimit), nats.NoReconnect())
	if err != nil {
		t.Fatal(err)
	}
	nc.Close()
	if d.dials < 2 {
		t.Errorf("%d connections, want another one after the first", d.dials)
	}
}
