package control

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/autoscaler/record"
)

func replayed(t *testing.T, path string) Replay {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	r, err := ReplayRecord(f)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestReplayListsDifferences(t *testing.T) {
	d := history(t, 1, policy.Names{}, 12)[11]
	line, err := d.line()
	if err != nil {
		t.Fatal(err)
	}
	f := d.Plan.Wants[0].Function
	change := func(old, new string) string {
		t.Helper()
		s := string(line)
		if strings.Count(s, old) < 1 {
			t.Fatalf("no %s in %s", old, s)
		}
		return strings.Replace(s, old, new, 1)
	}
	plain := fmt.Sprintf(`"Function":%q,`, f)
	other := d
	other.Plan.Wants = append([]plan.Want{}, d.Plan.Wants...)
	other.Plan.Wants[0].Why, other.Plan.Wants[0].Key = "for fun", !d.Plan.Wants[0].Key
	other.Plan.Wants[0].Slots = append([]plan.Slot{{Node: "nowhere", Device: "g"}}, d.Plan.Wants[0].Slots...)
	other.Plan.Warm = append([]plan.Warm{{Function: "a", Node: "n", Warmth: plan.Parked, Key: true}}, d.Plan.Warm...)
	other.Err = errors.New("no\nstack")
	changed, err := other.line()
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		text   string
		diffs  []string // function field
		unread string
	}{
		"the same":        {string(line), nil, ""},
		"another plan":    {string(changed), []string{" error", "a warm n", f + " count", f + " key", f + " slots", f + " why"}, ""},
		"another version": {change(`{"version":1,`, `{"version":2,`), nil, "version 2, want 1: use the stagecoach that recorded it"},
		"no version":      {`{"Rev": 3}`, nil, "version 0, want 1"},
		"no JSON":         {"decision 1", nil, "no line of a record"},
		"cut short":       {string(line[:len(line)/2]), nil, "cut short: unexpected end of JSON input"},
		"an unknown field": {
			change(plain, plain+`"Colour":"red",`), nil, `unknown field "Colour"`,
		},
		"an unknown policy": {change(`"placer":"dispersed"`, `"placer":"feng-shui"`), nil, `placer "feng-shui", want one of dispersed`},
		"a memory of others": {
			change(`"memory":[`, `"memory":[{"functions":["x"],"allocator":"text"},`), nil, `memory of ["x"]`,
		},
		"a plan of another kind": {change(`"plan":{`, `"plan":{"Wants":3,`), nil, "cannot unmarshal number into Go struct field"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := ReplayRecord(strings.NewReader("\n" + tc.text))
			if err != nil {
				t.Fatal(err)
			}
			var diffs []string
			for _, d := range got.Diffs {
				diffs = append(diffs, d.Function+" "+d.Field)
				if d.Line != 2 || d.Rev != 13 || d.Recorded == d.Got {
					t.Errorf("%+v, want line 2 of snapshot 13, and what is different", d)
				}
			}
			if !reflect.DeepEqual(diffs, tc.diffs) {
				t.Errorf("differences %q, want %q", diffs, tc.diffs)
			}
			switch {
			case tc.unread == "" && (got.Decisions != 1 || len(got.Unread) > 0):
				t.Errorf("%+v, want one decision", got)
			case tc.unread != "" && (len(got.Unread) != 1 || got.Unread[0].Line != 2 || !strings.Contains(got.Unread[0].Why, tc.unread)):
				t.Errorf("unread %+v, want line 2: %s", got.Unread, tc.unread)
			}
			if got.Same() != (tc.diffs == nil && tc.unread == "") {
				t.Errorf("the same: %t", got.Same())
			}
		})
	}
	if _, err := ReplayRecord(strings.NewReader("\n" + strings.Repeat("x", record.MaxLine+1))); err == nil || !strings.Contains(err.Error(), "line 2: longer than 64 MiB") {
		t.Errorf("an endless line: %v", err)
	}
}

// FuzzReplay checks that no text causes a panic, and that what can be read can be read again.
func FuzzReplay(f *testing.F) {
	f.Add([]byte(`{"version":1,"policies":{},"snapshot":{"Rev":1},"memory":[],"plan":{"Rev":1}}`))
	f.Add([]byte(`{"version":1,"policies":{"placer":"spread"},"snapshot":{"Functions":[{"Name":"f","Max":3}]},"memory":[{"functions":["f"]}],"plan":{}}`))
	f.Add([]byte("{}\n{\"version\":7}\nx"))
	f.Fuzz(func(t *testing.T, text []byte) {
		a, err := ReplayRecord(bytes.NewReader(text))
		b, again := ReplayRecord(bytes.NewReader(text))
		if !reflect.DeepEqual(a, b) || (err == nil) != (again == nil) {
			t.Errorf("%+v, %v; then %+v, %v", a, err, b, again)
		}
	})
}

// TestTheRecordOfARealRun replays decisions that a real `stagecoach up` recorded: a pipeline of
// four stages before, during and after a burst. If the test fails, a policy decides differently
// now, and the output has the differences. If the change is intended, `make record` makes a new
// record, and the commit gives the reason.
func TestTheRecordOfARealRun(t *testing.T) {
	path := filepath.Join("..", "autoscaler", "testdata", "record.jsonl")
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	most, keys := 0, 0
	for line := range bytes.Lines(b) {
		var r struct{ Plan plan.Plan }
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		for _, w := range r.Plan.Wants {
			most = max(most, len(w.Slots))
			if w.Key {
				keys++
			}
		}
	}
	got := replayed(t, path)
	if got.Decisions < 20 || most < 3 || keys == 0 || len(b) > 300<<10 {
		t.Errorf("%d decisions in %d bytes, at most %d replicas, %d key stages: no record of a burst", got.Decisions, len(b), most, keys)
	}
	for _, d := range got.Diffs[:min(len(got.Diffs), 10)] {
		t.Errorf("line %d, %s %s:\nrecorded %s\ngot      %s", d.Line, d.Function, d.Field, d.Recorded, d.Got)
	}
	if !got.Same() {
		t.Errorf("%d differences, unread %v; if a policy was changed on purpose: make record", len(got.Diffs), got.Unread)
	}
}

// TestReplayComparesTablesAndRanks changes what tasks follow in a recorded plan.
func TestReplayComparesTablesAndRanks(t *testing.T) {
	t.Parallel()
	for seed := uint64(0); ; seed += 2 {
		if seed > 100 {
			t.Fatal("no world has tables and entries that ask for policies")
		}
		d := history(t, seed, policy.Names{Rank: "least-slack"}, 8)[7]
		if d.Err != nil || len(d.Plan.Tables) == 0 || len(d.Plan.Ruled) == 0 {
			continue
		}
		sets := map[policy.Names]policy.Set{}
		same, err := d.line()
		if err != nil {
			t.Fatal(err)
		}
		if diffs, err := again(same, sets); err != nil || len(diffs) > 0 {
			t.Errorf("as recorded: %+v, %v, want no difference", diffs, err)
		}
		d.Plan.Tables = append([]plan.Table{}, d.Plan.Tables...)
		d.Plan.Tables[0].Version++
		row := d.Plan.Tables[0].Rows[0]
		row.Levels = append([]plan.Level{{MaxLength: 1, Shares: row.Levels[0].Shares}}, row.Levels...)
		d.Plan.Tables[0].Rows = append([]plan.Row{row}, d.Plan.Tables[0].Rows[1:]...)
		d.Plan.Excluded = append([]plan.Chain{{"a.ns", "b.ns"}}, d.Plan.Excluded...)
		d.Plan.Ruled = nil
		d.Plan.Wants = append([]plan.Want{}, d.Plan.Wants...)
		d.Plan.Wants[0].Rank = "fifo"
		line, err := d.line()
		if err != nil {
			t.Fatal(err)
		}
		diffs, err := again(line, sets)
		if err != nil {
			t.Fatal(err)
		}
		found := map[string]bool{}
		for _, diff := range diffs {
			found[strings.Fields(diff.Field)[0]] = true
			found[diff.Field] = true
		}
		for _, field := range []string{"table version", `table from ""`, "excluded", "policies", "rank"} {
			if !found[field] {
				t.Errorf("no difference of %s in %+v", field, diffs)
			}
		}
		return
	}
}
