package queue

import (
	"slices"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/stagecoach-serving/stagecoach/internal/previous"
)

// TestReadsThePreviousVersion opens a journal that the previous version has written.
func TestReadsThePreviousVersion(t *testing.T) {
	nc := start(t, t.TempDir())
	cfg := JournalConfig{Blobs: t.TempDir()}
	openJournal(t, nc, cfg)
	var want []string
	dead := previous.Messages(t, "dead.", "")
	// A record that has a dead letter is not found.
	runs := slices.DeleteFunc(previous.Messages(t, "journal.", ""), func(m previous.Message) bool {
		return strings.HasSuffix(m.Subject, strings.TrimPrefix(dead[0].Subject, "dead"))
	})
	for _, m := range append(runs, dead...) {
		header := nats.Header(m.Header)
		header.Del("Nats-Expected-Last-Subject-Sequence")
		if _, err := nc.RequestMsg(&nats.Msg{Subject: m.Subject, Header: header, Data: m.Data()}, waitLimit); err != nil {
			t.Fatal(err)
		}
		if header.Get(headCause) == "" {
			kind := Run
			if header.Get(headKind) != "" {
				kind = Callback
			}
			last := strings.Count(m.Subject, ".")
			want = append(want, kind.String()+" "+m.Token(last-1)+" "+m.Token(last))
		}
	}
	var got []string
	cfg.Found = func(f Found) { got = append(got, f.Kind.String()+" "+f.Function+" "+f.ID) }
	j := openJournal(t, nc, cfg)
	slices.Sort(got)
	slices.Sort(want)
	if want = slices.Compact(want); !slices.Equal(got, want) {
		t.Errorf("found %q, want %q", got, want)
	}
	if all := letters(t, j); len(all) != 1 || all[0].Function != "web.openfaas-fn" || all[0].Cause == "" || all[0].Accepted.IsZero() {
		t.Errorf("dead letters %+v", all)
	}
}
