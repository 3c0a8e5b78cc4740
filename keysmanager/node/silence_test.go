package node

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// table is a Bus within a process. A message has been handled when Send returns.
type table struct {
	mu  sync.Mutex
	all map[string][]func(node, reply string, data []byte)
}

func (b *table) Send(name, kind, reply string, data []byte) error {
	b.mu.Lock()
	fs := append(append([]func(string, string, []byte){}, b.all[name+" "+kind]...), b.all[" "+kind]...)
	b.mu.Unlock()
	for _, f := range fs {
		f(name, reply, data)
	}
	return nil
}

func (b *table) Listen(name, kind string, f func(node, reply string, data []byte)) (func(), error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.all[name+" "+kind] = append(b.all[name+" "+kind], f)
	return func() {}, nil
}

// TestSilentWithinThreeSeconds checks, in virtual time, that a silent node leaves within three
// seconds of its last announcement, and that the next announcement makes it join again. A pause of
// slightly more than two seconds must not count as silence.
func TestSilentWithinThreeSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bus := &table{all: map[string][]func(string, string, []byte){}}
		joins, lefts := 0, 0
		var left time.Time
		d, err := OpenDirectory(DirectoryConfig{
			Bus: bus, Boot: "b", Log: slog.New(slog.DiscardHandler),
			Joined: func(*Client) { joins++ }, Heard: func(*Client) {}, Event: func(string, Event) {},
			Left: func(string, string) { lefts, left = lefts+1, time.Now() },
		})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		announce := func() time.Time {
			b, err := json.Marshal(Inventory{V: Version, Identity: Identity{Name: "n", ID: "A", Boot: "b"}})
			if err != nil {
				t.Fatal(err)
			}
			_ = bus.Send("n", kindInventory, "", b)
			synctest.Wait()
			return time.Now()
		}
		announce()
		for range 5 {
			time.Sleep(2300 * time.Millisecond) // one announcement was lost and one is late
			announce()
		}
		if joins != 1 || lefts != 0 {
			t.Fatalf("joined %d times and left %d times, want 1 and 0", joins, lefts)
		}
		last := announce()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if after := left.Sub(last); lefts != 1 || after > 3*time.Second {
			t.Errorf("left %d times, %v after its last announcement, want once, within 3 s", lefts, after)
		}
		announce()
		if joins != 2 || len(d.Clients()) != 1 {
			t.Errorf("joined %d times, want again", joins)
		}
	})
}

// TestSleepOfTheListenerSilencesNoNode stops the listener itself, as when a laptop sleeps. When the
// listener wakes up, no node may have left. A node that falls silent afterwards must be found
// within the usual time.
func TestSleepOfTheListenerSilencesNoNode(t *testing.T) {
	for range 8 { // what comes first on waking up is chance
		synctest.Test(t, func(t *testing.T) {
			bus := &table{all: map[string][]func(string, string, []byte){}}
			sleep := make(chan time.Duration, 1)
			left := make(chan time.Time, 2)
			d, err := OpenDirectory(DirectoryConfig{
				Bus: bus, Boot: "b", Log: slog.New(slog.DiscardHandler), Joined: func(*Client) {}, Event: func(string, Event) {},
				Heard: func(*Client) {
					select {
					case long := <-sleep:
						time.Sleep(long)
					default:
					}
				},
				Left: func(string, string) { left <- time.Now() },
			})
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			b, err := json.Marshal(Inventory{V: Version, Identity: Identity{Name: "n", ID: "A", Boot: "b"}})
			if err != nil {
				t.Fatal(err)
			}
			announce := func() { _ = bus.Send("n", kindInventory, "", b) }
			announce()
			synctest.Wait()
			sleep <- 10 * time.Second
			announce()
			announce() // waits
			time.Sleep(10*time.Second + 2*lookEvery)
			synctest.Wait()
			if len(left) > 0 {
				t.Fatal("a node has left while we slept")
			}
			awake := time.Now()
			time.Sleep(20 * time.Second)
			synctest.Wait()
			if len(left) != 1 {
				t.Fatalf("left %d times since we woke up, want once", len(left))
			}
			if after := (<-left).Sub(awake); after > 3*time.Second {
				t.Fatalf("left %v after we woke up, want within 3 s", after)
			}
		})
	}
}

// TestNodesThatHaveGoneMakeRoom announces more nodes than a Directory keeps. Nodes that have gone
// make room for new ones. If all nodes are present, a new one cannot join. The test runs in virtual
// time, so that no node falls silent because the machine is busy.
func TestNodesThatHaveGoneMakeRoom(t *testing.T) { synctest.Test(t, testManyNames) }

func testManyNames(t *testing.T) {
	bus := &table{all: map[string][]func(string, string, []byte){}}
	var joins atomic.Int64
	d, err := OpenDirectory(DirectoryConfig{
		Bus: bus, Boot: "b", Log: slog.New(slog.DiscardHandler), Joined: func(*Client) { joins.Add(1) },
		Heard: func(*Client) {}, Event: func(string, Event) {}, Left: func(string, string) {},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	announce := func(i int, gone bool) {
		name := fmt.Sprintf("n%d", i)
		b, err := json.Marshal(Inventory{V: Version, Identity: Identity{Name: name, ID: "A", Boot: "b"}, Departure: Departure{Gone: gone}})
		if err != nil {
			t.Fatal(err)
		}
		_ = bus.Send(name, kindInventory, "", b)
		synctest.Wait() // otherwise the next one would replace it
	}
	for i := range maxNodes + 5 {
		announce(i, false)
		if i >= maxNodes-10 {
			continue
		}
		announce(i, true)
	}
	for i := range maxNodes { // all that is not there makes room
		announce(2*maxNodes+i, false)
	}
	done := make(chan struct{})
	d.post(func() { close(done) })
	<-done
	if got := len(d.Clients()); got != maxNodes || len(d.nodes) != maxNodes {
		t.Errorf("%d nodes are there and %d are kept, want %d", got, len(d.nodes), maxNodes)
	}
	if got := joins.Load(); got != 2*maxNodes-10 {
		t.Errorf("joined %d times, want %d", got, 2*maxNodes-10)
	}
}

// TestOnlyRootAndTheSameUserMayAskForSockets checks who may ask a daemon for a replica's socket.
func TestOnlyRootAndTheSameUserMayAskForSockets(t *testing.T) {
	for _, tc := range []struct {
		peer, me uint32
		ok       bool
	}{{7, 7, true}, {0, 7, true}, {0, 0, true}, {8, 7, false}, {7, 0, false}} {
		if err := known(unix.Ucred{Pid: 1, Uid: tc.peer}, tc.me); (err == nil) != tc.ok {
			t.Errorf("user %d at a process of user %d: %v, want it allowed: %v", tc.peer, tc.me, err, tc.ok)
		}
	}
}
