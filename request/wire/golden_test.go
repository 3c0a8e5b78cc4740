package wire

import (
	"encoding/hex"
	flags "flag"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/stagecoach-serving/stagecoach/request/task"
)

var rewrite = flags.Bool("rewrite", false, "write the golden files of the current version of messages")

// golden returns a message that a golden file holds as a hex dump.
func golden(t testing.TB, file string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	var digits strings.Builder
	for line := range strings.Lines(string(text)) {
		_, bytes, _ := strings.Cut(line, "  ")
		bytes, _, _ = strings.Cut(bytes, "|")
		digits.WriteString(strings.Join(strings.Fields(bytes), ""))
	}
	b, err := hex.DecodeString(digits.String())
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return b
}

// message is a message in each version. The older form has what a program of today reads from it.
type message struct {
	now, old any
	encode   func() []byte
	decode   func(b []byte) (any, error)
}

type request struct {
	request  any
	function string
}

func messages() map[string]message {
	old := &task.Task{
		Key: someKey, Function: "f.ns", Pipeline: "p.ns", Stage: "f", ReplyTo: "_INBOX.x", Deadline: time.Unix(5, 6), Traceparent: "00-1", Header: someHeader, Input: someInput,
		Pins: []task.Pin{{Function: "f.ns", Revision: 300}}, Together: true, Alone: true, Origin: task.Origin{App: "p.ns", Due: time.Unix(5, 6)}, Place: task.Place{Rank: 5.000000006},
	}
	now := *old
	fill(&now)
	now.Pins = []task.Pin{{Function: "f.ns", Revision: 300}, {Function: "small.ns", Revision: 7}}
	oldReply := &task.Reply{
		Key: someKey, Code: task.OutOfMemory, Message: "no", Replica: "r", Wait: 3, Service: 4, Batch: 5, BatchSize: 6, Output: someInput[1].Items, Header: someHeader, Revision: 300, Blame: task.BlameCompany,
	}
	nowReply := *oldReply
	nowReply.Code, nowReply.Variant, nowReply.Reason = task.Dropped, "small.ns", task.DropLate
	return map[string]message{
		"task": {
			&now, old, func() []byte { return AppendTask(nil, &now) },
			func(b []byte) (any, error) { return DecodeTask(b) },
		},
		"reply": {
			&nowReply, oldReply, func() []byte { return AppendReply(nil, &nowReply) },
			func(b []byte) (any, error) { return DecodeReply(b) },
		},
		"cancel": {
			request{someKey, "f.ns"},
			request{someKey, "f.ns"},
			func() []byte { return AppendCancel(nil, someKey, "f.ns") },
			func(b []byte) (any, error) { k, f, err := DecodeCancel(b); return request{k, f}, err },
		},
		"leave": {
			request{"call-1", "f.ns"},
			request{"call-1", "f.ns"},
			func() []byte { return AppendLeave(nil, "call-1", "f.ns") },
			func(b []byte) (any, error) { r, f, err := DecodeLeave(b); return request{r, f}, err },
		},
	}
}

// TestMessagesOfBothVersions reads golden messages of this version and of the one before, and
// checks that messages are written as this version's golden files have them. The files of version 3
// were written by a program of that version.
func TestMessagesOfBothVersions(t *testing.T) {
	for name, m := range messages() {
		t.Run(name, func(t *testing.T) {
			if b := m.encode(); *rewrite {
				if err := os.WriteFile(filepath.Join("testdata", name+".v4.hex"), []byte(hex.Dump(b)), 0o600); err != nil {
					t.Fatal(err)
				}
			} else if want := golden(t, name+".v4.hex"); !reflect.DeepEqual(b, want) {
				t.Errorf("written as\n%s\nwant\n%s\nA change of the layout needs a new version", hex.Dump(b), hex.Dump(want))
			}
			for file, want := range map[string]any{name + ".v4.hex": m.now, name + ".v3.hex": m.old} {
				if got, err := m.decode(golden(t, file)); err != nil || !reflect.DeepEqual(got, want) {
					t.Errorf("%s: %v\n got %+v\nwant %+v", file, err, got, want)
				}
			}
		})
	}
}

// TestOldMessagesHaveOldCodes checks that a message of version 3 with a code that this version did
// not have is refused, and that a task that is not pinned stays so.
func TestOldMessagesHaveOldCodes(t *testing.T) {
	b := golden(t, "reply.v3.hex")
	b[2+1+len(someKey.Request)+2] = byte(task.Dropped)
	if _, err := DecodeReply(b); err == nil || !strings.Contains(err.Error(), "code 10, want at most 9") {
		t.Errorf("a reply of version 3 with code 10: %v, want it refused", err)
	}
	b = golden(t, "task.v3.hex")
	at := len(b) - 4 // 300 as two bytes, then two flags
	b = append(b[:at:at], 0, 0, 0)
	if got, err := DecodeTask(b); err != nil || got.Pins != nil || got.Together || got.Alone {
		t.Errorf("%+v, %v, want no pins and no flags", got, err)
	}
	for _, version := range []byte{OldestEnvelope - 1, EnvelopeVersion + 1} {
		b[1] = version
		if _, err := DecodeTask(b); err == nil || !strings.Contains(err.Error(), "want 3 to 4") {
			t.Errorf("version %d: %v, want it refused", version, err)
		}
	}
}
