package node

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// TestWaitingAnnouncementsCount makes announcements wait for the directory for longer than silence
// takes. Their nodes were heard, so they must not leave. A node that really falls silent meanwhile
// must leave in time.
func TestWaitingAnnouncementsCount(t *testing.T) {
	for range 8 { // which of two ready events goes first is chance
		synctest.Test(t, func(t *testing.T) {
			bus := &table{all: map[string][]func(string, string, []byte){}}
			var mu sync.Mutex
			var left []string
			d, err := OpenDirectory(DirectoryConfig{
				Bus: bus, Boot: "b", Log: slog.New(slog.DiscardHandler), Joined: func(*Client) {}, Event: func(string, Event) {},
				Heard: func(c *Client) {
					if strings.HasPrefix(c.Name(), "slow") {
						time.Sleep(lookEvery * 9 / 10) // too short to be noticed as a sleep
					}
				},
				Left: func(name, _ string) {
					mu.Lock()
					defer mu.Unlock()
					left = append(left, name)
				},
			})
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			announce := func(name string) {
				b, err := json.Marshal(Inventory{V: Version, Identity: Identity{Name: name, ID: "A", Boot: "b"}})
				if err != nil {
					t.Fatal(err)
				}
				_ = bus.Send(name, kindInventory, "", b)
			}
			const slow = 40 // their announcements take 3.6 s
			announce("busy")
			announce("silent")
			for range 12 { // seconds
				for i := range slow {
					announce(fmt.Sprint("slow", i))
				}
				announce("busy")
				time.Sleep(time.Second)
			}
			mu.Lock()
			defer mu.Unlock()
			if slices.Contains(left, "busy") {
				t.Fatalf("%v left, but busy was heard every second", left)
			}
			if !slices.Contains(left, "silent") {
				t.Fatalf("%v left, want silent, which was not heard for 12 s", left)
			}
		})
	}
}

func TestLinesMayBeLongerThanTheBuffer(t *testing.T) {
	text := strings.Repeat("a", maxLineBytes-1)
	r := bufio.NewReaderSize(strings.NewReader("short\n"+text+"\nlast\n"+text+"aa\n"), readBytes)
	for _, want := range []string{"short", text, "last"} {
		got, err := readLine(r)
		if err != nil || string(got) != want+"\n" {
			t.Fatalf("%d bytes and %v, want a line of %d", len(got), err, len(want)+1)
		}
	}
	if _, err := readLine(r); !errors.Is(err, errLongLine) {
		t.Errorf("%v, want an error: the line has %d bytes", err, maxLineBytes+2)
	}
}

func TestOneMessageIsDecodedLikeAnyOther(t *testing.T) {
	inv := Inventory{V: Version, Identity: Identity{Name: "n", ID: "A"}, Replicas: []Replica{{Name: "r"}}}
	b, err := json.Marshal(inv)
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{string(b), " " + string(b), strings.Replace(string(b), `"v":1`, `"v": 1`, 1)} {
		if got, err := DecodeInventory([]byte(text)); err != nil || got.Name != "n" || len(got.Replicas) != 1 {
			t.Errorf("%s: %+v, %v", text, got, err)
		}
	}
	if _, err := DecodeInventory([]byte(strings.Replace(string(b), `"v":1,`, `"v":12,`, 1))); !errors.Is(err, ErrVersion) {
		t.Errorf("version 12: %v, want %v", err, ErrVersion)
	}
}

// TestOnlyTheLatestAnnouncementWaits sends announcements faster than the directory takes them. One
// per node may wait, with the latest contents. The last announcement of a daemon and the first of
// the next one must both be taken.
func TestOnlyTheLatestAnnouncementWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bus := &table{all: map[string][]func(string, string, []byte){}}
		busy := make(chan struct{})
		var heard []uint64
		lefts, joins := 0, 0
		d, err := OpenDirectory(DirectoryConfig{
			Bus: bus, Boot: "b", Log: slog.New(slog.DiscardHandler), Event: func(string, Event) {},
			Joined: func(*Client) { joins++ }, Left: func(string, string) { lefts++ },
			Heard: func(c *Client) {
				heard = append(heard, c.Inventory().OutputLost)
				if c.Name() == "other" {
					<-busy
				}
			},
		})
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		announce := func(name, id string, number uint64, gone bool) {
			b, err := json.Marshal(Inventory{V: Version, Identity: Identity{Name: name, ID: id, Boot: "b"}, OutputLost: number, Departure: Departure{Gone: gone}})
			if err != nil {
				t.Fatal(err)
			}
			_ = bus.Send(name, kindInventory, "", b)
		}
		announce("n", "A", 1, false)
		synctest.Wait()
		announce("other", "A", 100, false)
		synctest.Wait() // the directory waits for busy
		for i := range uint64(2 * inboxLength) {
			announce("n", "A", 2+i, false)
		}
		if waits := len(d.inbox); waits != 1 {
			t.Errorf("%d announcements wait, want one", waits)
		}
		close(busy)
		synctest.Wait()
		if want := []uint64{1, 100, 2*inboxLength + 1}; !slices.Equal(heard, want) {
			t.Errorf("heard %v, want %v", heard, want)
		}
		busy = make(chan struct{})
		announce("other", "A", 101, false)
		synctest.Wait()
		announce("n", "A", 0, true)
		announce("n", "B", 7, false)
		close(busy)
		synctest.Wait()
		if lefts != 1 || joins != 3 || heard[len(heard)-1] != 7 {
			t.Errorf("left %d times, joined %d times, heard %v; want the daemon to leave and the next one to join", lefts, joins, heard)
		}
	})
}
