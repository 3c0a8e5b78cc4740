package wire

import (
	"os"
	"strings"
	"testing"
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
			"relay": Relay,
			"edited": func(to, from Socket) error {
				return RelayEdited(NewOutlet(to), from, func(*Frame) (Edited, error) { return Unchanged, nil })
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
