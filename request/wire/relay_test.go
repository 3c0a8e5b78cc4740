package wire

import (
	"io"
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// claims returns the bytes of two frames that claim a file each.
func claims(kind FrameType, version byte) []byte {
	var b []byte
	for range 2 {
		at := len(b)
		b = appendFrame(b, Frame{Type: kind, Batch: 1, Payload: Result{}.Append(nil), Files: make([]*os.File, 1)})
		b[at+7] = version
	}
	return b
}

// TestRelaysCountFiles checks that a relay ends with an error, and its process goes on, if frames
// that come together claim more files than have come, or if files come that none claims.
func TestRelaysCountFiles(t *testing.T) {
	file, err := sealed([]byte("x"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for version := byte(Version); version <= Version+1; version++ {
		for name, relay := range map[string]func(to, from Socket) error{
			"relay": func(to, from Socket) error { return Relay(NewOutlet(to), from, nil) },
			"edited": func(to, from Socket) error {
				return Relay(NewOutlet(to), from, func(*Frame) (Edited, error) { return Unchanged, nil })
			},
			"switch": func(to, from Socket) error {
				d := NewSwitch(from, SwitchConfig{Keep: long, Overtaken: long, Patience: long})
				defer d.Close()
				if _, err := d.Connect(to); err != nil {
					return err
				}
				<-d.Done()
				return d.Err()
			},
		} {
			for want, send := range map[string]func(Socket) error{
				"came without its files": func(s Socket) error { return put(s, claims(FrameResult, version), []*os.File{file}) },
				"no frame has claimed": func(s Socket) error {
					head := appendHeader(nil, Frame{Type: FrameResult, Payload: make([]byte, 9)})
					most := make([]*os.File, MaxFiles)
					for i := range most {
						most[i] = file
					}
					for i := range 3 {
						if err := put(s, head[i:i+1], most); err != nil {
							return err
						}
					}
					return nil
				},
			} {
				a, from := pair(t)
				to, _ := pair(t)
				if err := send(NewSocket(a)); err != nil {
					t.Fatal(err)
				}
				if err := a.CloseWrite(); err != nil {
					t.Fatal(err)
				}
				if err := relay(NewSocket(to), NewSocket(from)); err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%s, version %d: %v, want %q", name, version, err, want)
				}
			}
		}
	}
}

// TestSwitchDropsFilesOfTheirFrame refuses a batch while an earlier one of the same read is not
// sent yet. Both have a file.
func TestSwitchDropsFilesOfTheirFrame(t *testing.T) {
	d := newStand(t)
	d.first(false)
	r := &frames{}
	for i, name := range []string{"", "passes", "is refused"} {
		f := Frame{Type: FrameBatch, Batch: uint64(i) + 1, Payload: Batch{Calls: make([]Call, 1)}.Append(nil)}
		if name != "" {
			file, err := sealed([]byte(name))
			if err != nil {
				t.Fatal(err)
			}
			f.Files = []*os.File{file}
			r.files = append(r.files, file)
		}
		r.buf = appendFrame(r.buf, f)
	}
	r.end = len(r.buf)
	d.mu.Lock()
	overtaken := d.owner
	d.mu.Unlock()
	d.nmu.Lock() // the first batch waits until the relay refuses the last one
	passed := make(chan error, 1)
	go func() { passed <- d.passOwner(overtaken, r) }()
	for admitted := 0; admitted < 2; {
		d.mu.Lock()
		admitted = overtaken.open
		d.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
	d.connect(false)
	d.nmu.Unlock()
	d.hear(FrameBatch)
	f := d.hear(FrameBatch)
	defer closeAll(f.Files)
	if got := content(t, f.Files[0]); string(got) != "passes" {
		t.Errorf("a batch comes with the file of one that %s", got)
	}
	if err := <-passed; err != nil || len(r.files) > 0 {
		t.Errorf("%d files are left, %v", len(r.files), err)
	}
}

// TestFlagsOfReplicas sends flags that replicas must not set, in frames of this version and of a
// later one. An edit sees them if the type is known, and a Switch clears them.
func TestFlagsOfReplicas(t *testing.T) {
	for version := byte(Version); version <= Version+1; version++ {
		for _, kind := range []FrameType{FrameResult, FrameError, 200} {
			if version == Version && !kind.known() {
				continue
			}
			forged := appendFrame(nil, Frame{Type: kind, Batch: 1, Kept: true, Keep: true, Payload: Result{}.Append(nil)})
			forged[7] = version
			a, from := pair(t)
			to, _ := pair(t)
			if _, err := a.Write(forged); err != nil {
				t.Fatal(err)
			}
			_ = a.Close()
			var seen []FrameType
			err := Relay(NewOutlet(NewSocket(to)), NewSocket(from), func(f *Frame) (Edited, error) {
				if f.Kept && f.Keep {
					seen = append(seen, f.Type)
				}
				return Unchanged, nil
			})
			if err != nil || kind.known() != slices.Contains(seen, kind) {
				t.Errorf("%v of version %d: edits see %v, %v", kind, version, seen, err)
			}

			d := newStand(t)
			o := d.first(false)
			if _, err := d.raw.Write(forged); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, len(forged))
			if _, err := io.ReadFull(o.raw, b); err != nil || b[5] != 0 || b[4] != byte(kind) {
				t.Errorf("%v of version %d: the owner gets % x, %v", kind, version, b, err)
			}
		}
	}
}

// TestSwitchKeepsWholeHellos checks that the next owner's greeting is a Hello whatever the replica
// says.
func TestSwitchKeepsWholeHellos(t *testing.T) {
	d := newStand(t)
	d.first(false)
	b := appendHeader(nil, Frame{Type: FrameHello})
	r := &frames{buf: b, end: len(b)}
	f, ok, err := r.whole()
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	if _, err := d.sort(r, f); err == nil {
		t.Error("an empty Hello: no error")
	}
	d.connect(false).next(FrameHello)
}
