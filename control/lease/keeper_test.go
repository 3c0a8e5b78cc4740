package lease_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stagecoach-serving/stagecoach/control/lease"
	"github.com/stagecoach-serving/stagecoach/internal/natstest"
	"github.com/stagecoach-serving/stagecoach/internal/proctest"
	"github.com/stagecoach-serving/stagecoach/request/queue"
)

// holderURLs makes the test binary hold leases until it is killed. It has the servers' addresses.
const holderURLs = "STAGECOACH_TEST_HOLDER"

func TestMain(m *testing.M) {
	natstest.Main()
	if urls := os.Getenv(holderURLs); urls != "" {
		hold(urls)
	}
	goleak.VerifyTestMain(m)
}

// store adapts a bucket's errors.
type store struct{ *queue.KV }

func (s store) Replace(ctx context.Context, key string, value []byte, rev uint64) (uint64, error) {
	rev, err := s.KV.Replace(ctx, key, value, rev)
	if errors.Is(err, queue.ErrConflict) {
		err = lease.ErrConflict
	}
	return rev, err
}

func (s store) Get(ctx context.Context, key string) ([]byte, uint64, error) {
	b, rev, err := s.KV.Get(ctx, key)
	if errors.Is(err, queue.ErrNotFound) {
		err = lease.ErrNone
	}
	return b, rev, err
}

// open returns a Keeper with its own connection, and a function that counts its messages.
func open(ctx context.Context, me string, urls []string) (k *lease.Keeper, messages func() uint64, done func(), err error) {
	log := slog.New(slog.DiscardHandler)
	c, err := queue.OpenCluster(ctx, queue.ClusterConfig{URLs: urls, Log: log})
	if err != nil {
		return nil, nil, nil, err
	}
	nc, err := c.Connect("leases")
	if err != nil {
		return nil, nil, nil, err
	}
	kv, err := queue.OpenKV(ctx, nc, c.Disk(), "leases")
	if err != nil {
		return nil, nil, nil, err
	}
	k, err = lease.Open(ctx, lease.KeeperConfig{Store: store{kv}, Me: me, Where: "at " + me, Knows: "of " + me, Log: log})
	return k, func() uint64 { s := nc.Stats(); return s.InMsgs + s.OutMsgs }, func() { nc.Close(); c.Close() }, err
}

// keeper is open for a test.
func keeper(t testing.TB, me string, of *natstest.Cluster) (*lease.Keeper, func() uint64) {
	t.Helper()
	k, messages, done, err := open(t.Context(), me, of.URLs())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		k.Close(ctx)
		done()
	})
	return k, messages
}

// hold takes the lease "a" in a process of its own.
func hold(urls string) {
	k, _, _, err := open(context.Background(), fmt.Sprint("child", os.Getpid()), strings.Split(urls, ","))
	if err != nil {
		panic(err)
	}
	k.Lease("a", lease.Options{Changed: func(s lease.State) {
		if s.Holds {
			fmt.Println("holds")
		}
	}})
	select {}
}

// child starts a process that takes the lease, and returns when it has it.
func child(t testing.TB, of *natstest.Cluster) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0]) //nolint:noctx // killed
	cmd.Env = append(os.Environ(), holderURLs+"="+of.String())
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := proctest.Start(cmd); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 16)); err != nil {
		t.Fatal("the process has not taken the lease: ", err)
	}
	return cmd
}

func until(t testing.TB, what string, done func() bool) {
	t.Helper()
	for limit := time.Now().Add(time.Minute); !done(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatal("still waiting: " + what)
		}
	}
}

// TestNextProcessTakesTheLease has the lease of a process that is killed, or stopped and continued,
// taken by another. The process that was stopped knows at once that it has lost the lease.
func TestNextProcessTakesTheLease(t *testing.T) {
	of := natstest.Start(t, 3)
	k, _ := keeper(t, "me", of)
	var mu sync.Mutex
	var states []lease.State
	first := child(t, of)
	l := k.Lease("a", lease.Options{Changed: func(s lease.State) {
		mu.Lock()
		defer mu.Unlock()
		states = append(states, s)
	}})
	until(t, "the holder to be known", func() bool { return strings.HasPrefix(l.State().Where, "at child") })
	if _, ok := l.Epoch(); ok {
		t.Error("two processes hold the lease")
	}
	if is := l.State(); !is.Understands("of") || is.Understands("me") {
		t.Errorf("the holder knows %q, want its own features", is.Knows)
	}
	before := l.State().Epoch
	kill(t, first)
	until(t, "the lease", func() bool { _, ok := l.Epoch(); return ok })
	if is := l.State(); is.Epoch <= before || is.Holder != "me" || is.Where != "at me" || !is.Understands("me") {
		t.Errorf("after the first holder, %+v, want an epoch above %d", is, before)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	l.Release(ctx)
	if _, ok := l.Epoch(); ok || ctx.Err() != nil {
		t.Error("the lease is held after its release: ", ctx.Err())
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.IsSortedFunc(states, func(a, b lease.State) int { return int(a.Epoch) - int(b.Epoch) }) {
		t.Errorf("epochs do not rise: %+v", states)
	}
	kill(t, child(t, of)) // takes it at once, because it was released
}

func kill(t testing.TB, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Process.Kill(); err != nil {
		t.Error(err)
	}
	_ = cmd.Wait()
}

// TestLeaseOutlivesAServer kills a server of the cluster. The holder may lapse while the stream
// elects a leader, and then holds the lease again, before a process that waits for it.
func TestLeaseOutlivesAServer(t *testing.T) {
	of := natstest.Start(t, 3)
	k, _ := keeper(t, "me", of)
	l := k.Lease("a", lease.Options{})
	until(t, "the lease", func() bool { _, ok := l.Epoch(); return ok })
	first := l.State().Epoch
	for i := range 3 {
		of.Kill(i)
		time.Sleep(100 * time.Millisecond) // so that the holder notices, if it can
		of.Run(i)
		until(t, "the lease, again", func() bool { _, ok := l.Epoch(); return ok })
		time.Sleep(lease.Beat)
	}
	until(t, "the lease, at the end", func() bool { _, ok := l.Epoch(); return ok })
	if now := l.State().Epoch; now < first {
		t.Errorf("epoch %d after %d", now, first)
	}
}

// BenchmarkTakeover measures the time from the kill of a holder until the next process holds.
func BenchmarkTakeover(b *testing.B) {
	of := natstest.Start(b, 3)
	var all []time.Duration
	for i := range b.N {
		first := child(b, of)
		k, _ := keeper(b, fmt.Sprint("me", i), of)
		taken := make(chan struct{}, 1)
		l := k.Lease("a", lease.Options{Changed: func(s lease.State) {
			if s.Holds {
				select {
				case taken <- struct{}{}:
				default:
				}
			}
		}})
		time.Sleep(time.Duration(i%10) * lease.Beat / 10)
		from := time.Now()
		kill(b, first)
		<-taken
		all = append(all, time.Since(from))
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		l.Release(ctx)
		cancel()
	}
	slices.Sort(all)
	b.ReportMetric(all[len(all)/2].Seconds(), "median-s")
	b.ReportMetric(all[len(all)-1].Seconds(), "most-s")
}

// BenchmarkThousandLeases measures the messages and the processor time of 1,000 leases that one
// process holds and another follows, and how often a lease lapses.
func BenchmarkThousandLeases(b *testing.B) {
	const n = 1000
	of := natstest.Start(b, 3)
	holder, sent := keeper(b, "holder", of)
	waiter, heard := keeper(b, "waiter", of)
	var lapsed, held sync.Map
	var all []*lease.Lease
	for i := range n {
		name := fmt.Sprint("f", i)
		all = append(all, holder.Lease(name, lease.Options{Changed: func(s lease.State) {
			if s.Holds {
				held.Store(name, true)
			} else if _, was := held.Load(name); was {
				lapsed.Store(name, true)
			}
		}}))
	}
	until(b, "all leases", func() bool {
		return !slices.ContainsFunc(all, func(l *lease.Lease) bool { _, ok := l.Epoch(); return !ok })
	})
	for i := range n {
		waiter.Lease(fmt.Sprint("f", i), lease.Options{})
	}
	time.Sleep(2 * lease.Beat)
	for b.Loop() {
		s, h, from := sent(), heard(), time.Now()
		cpu := cpuTime()
		time.Sleep(10 * lease.Beat)
		took := time.Since(from).Seconds()
		b.ReportMetric(float64(sent()-s)/took/n, "holder-messages/s/lease")
		b.ReportMetric(float64(heard()-h)/took/n, "waiter-messages/s/lease")
		b.ReportMetric((cpuTime()-cpu).Seconds()/took, "cores")
	}
	count := 0
	lapsed.Range(func(any, any) bool { count++; return true })
	b.ReportMetric(float64(count), "lapsed")
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
