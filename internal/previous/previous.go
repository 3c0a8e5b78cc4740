// Package previous has messages and records that the previous version has written. Tests check with
// them that this version reads what the previous one writes, because both run during an upgrade.
//
// `make test-upgrade RECORD=1` records them again from a cluster of the previous version. Do that
// only when scripts/previous names another commit.
package previous

import (
	"bytes"
	_ "embed" // for the recorded messages
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"testing"
)

//go:embed testdata/messages.jsonl
var recorded []byte

// Message is a message of NATS. Records of a bucket are messages, too: $KV.BUCKET.KEY.
type Message struct {
	Subject string              `json:"subject"`
	Header  map[string][]string `json:"header,omitempty"`
	Text    string              `json:"text,omitempty"`  // the data, if it is text
	Bytes   []byte              `json:"bytes,omitempty"` // the data otherwise
}

// Data returns the data.
func (m Message) Data() []byte {
	if m.Text != "" {
		return []byte(m.Text)
	}
	return m.Bytes
}

// Token returns the subject's token with this number, unescaped.
func (m Message) Token(i int) string {
	var b strings.Builder
	for rest := strings.Split(m.Subject, ".")[i]; rest != ""; {
		if n, err := strconv.ParseUint(rest[1:min(len(rest), 3)], 16, 8); rest[0] == '=' && err == nil {
			b.WriteByte(byte(n))
			rest = rest[3:]
			continue
		}
		b.WriteByte(rest[0])
		rest = rest[1:]
	}
	return b.String()
}

// Messages returns the messages whose subject begins with first and ends with last. It fails t if
// there is none.
func Messages(t testing.TB, first, last string) []Message {
	t.Helper()
	var out []Message
	for d := json.NewDecoder(bytes.NewReader(recorded)); d.More(); {
		var m Message
		if err := d.Decode(&m); err != nil {
			t.Fatalf("messages of the previous version: %v", err)
		}
		if strings.HasPrefix(m.Subject, first) && strings.HasSuffix(m.Subject, last) {
			out = append(out, m)
		}
	}
	if len(out) == 0 {
		t.Fatalf("the previous version has written no message to %s…%s", first, last)
	}
	return out
}

// Kept fails t if the JSON of v lacks something that m has, or has another value there.
func Kept(t testing.TB, m Message, v any) {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var was, is any
	if err := json.Unmarshal(m.Data(), &was); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &is); err != nil {
		t.Fatal(err)
	}
	compare(t, m.Subject, was, is)
}

func compare(t testing.TB, path string, was, is any) {
	t.Helper()
	switch was := was.(type) {
	case map[string]any:
		now, ok := is.(map[string]any)
		for name, v := range was {
			if _, there := now[name]; !ok || !there {
				t.Errorf("%s.%s: lost, want %v", path, name, v)
				continue
			}
			compare(t, path+"."+name, v, now[name])
		}
	case []any:
		now, ok := is.([]any)
		if !ok || len(now) != len(was) {
			t.Errorf("%s: %v, want %v", path, is, was)
			return
		}
		for i := range was {
			compare(t, fmt.Sprintf("%s[%d]", path, i), was[i], now[i])
		}
	default:
		if !reflect.DeepEqual(was, is) {
			t.Errorf("%s: %v, want %v", path, is, was)
		}
	}
}
