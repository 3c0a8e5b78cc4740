package control

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
	"github.com/stagecoach-serving/stagecoach/autoscaler/record"
)

// Replay is the result of making recorded decisions again.
type Replay struct {
	Decisions int      `json:"decisions"` // number of decisions made again
	Diffs     []Diff   `json:"diffs"`
	Unread    []Unread `json:"unread"`
}

// Diff is a field of a plan that differs from the recorded one.
type Diff struct {
	Line     int    `json:"line"`               // of the file
	Rev      uint64 `json:"rev"`                // of the Snapshot
	Function string `json:"function,omitempty"` // empty: the plan's own
	Field    string `json:"field"`              // as plan.Want has them; warm NODE; table from SOURCE
	Recorded string `json:"recorded"`
	Got      string `json:"got"`
}

// Unread is a line whose decision could not be made again.
type Unread struct {
	Line int    `json:"line"`
	Why  string `json:"why"`
}

// Same reports whether every decision was made again with the same result.
func (r Replay) Same() bool { return len(r.Diffs) == 0 && len(r.Unread) == 0 }

// ReplayRecord makes the decisions of a record again, with the policies that the record names, and
// compares the plans. The result also lists the lines that this program cannot read, such as those
// of another version. ReplayRecord returns an error if file cannot be read or has a line that is
// too long.
func ReplayRecord(file io.Reader) (Replay, error) {
	out := Replay{Diffs: []Diff{}, Unread: []Unread{}}
	sets := map[policy.Names]policy.Set{}
	err := record.Scan(file, func(n int, text []byte) error {
		diffs, err := again(text, sets)
		if err != nil {
			out.Unread = append(out.Unread, Unread{n, err.Error()})
			return nil
		}
		out.Decisions++
		for _, d := range diffs {
			d.Line = n
			out.Diffs = append(out.Diffs, d)
		}
		return nil
	})
	return out, err
}

// again makes a recorded decision again and returns the differences.
func again(line []byte, sets map[policy.Names]policy.Set) ([]Diff, error) {
	r, err := record.Decode(line)
	if err != nil {
		return nil, err
	}
	set, ok := sets[r.Policies]
	if !ok {
		if set, err = r.Policies.Choose(); err != nil {
			return nil, err
		}
		sets[r.Policies] = set
	}
	memory, err := set.DecodeMemory(r.Memory)
	if err != nil {
		return nil, err
	}
	got, _, _, err := set.Decide(r.Snapshot, memory)
	return compare(r.Snapshot.Rev, r.Plan, got, r.Error, firstLine(err)), nil
}

// field is a field of a plan as text.
type field struct{ function, name, value string }

// compare returns the fields in which two plans differ.
func compare(rev uint64, recorded, got plan.Plan, recordedErr, gotErr string) []Diff {
	var diffs []Diff
	add := func(f field, recorded, got string) {
		if recorded != got {
			diffs = append(diffs, Diff{Rev: rev, Function: f.function, Field: f.name, Recorded: recorded, Got: got})
		}
	}
	add(field{name: "error"}, recordedErr, gotErr)
	x, y := fields(recorded), fields(got)
	order := func(a, b field) int { return cmp.Or(cmp.Compare(a.function, b.function), cmp.Compare(a.name, b.name)) }
	slices.SortFunc(x, order)
	slices.SortFunc(y, order)
	for len(x) > 0 || len(y) > 0 {
		switch {
		case len(y) == 0 || len(x) > 0 && order(x[0], y[0]) < 0:
			add(x[0], x[0].value, "")
			x = x[1:]
		case len(x) == 0 || order(x[0], y[0]) > 0:
			add(y[0], "", y[0].value)
			y = y[1:]
		default:
			add(x[0], x[0].value, y[0].value)
			x, y = x[1:], y[1:]
		}
	}
	return diffs
}

// fields returns the fields of a plan.
func fields(p plan.Plan) []field {
	all := []field{{"", "epoch", fmt.Sprint(p.Epoch)}, {"", "rev", fmt.Sprint(p.Rev)}, {"", "at", p.At.UTC().String()}}
	for _, w := range p.Wants {
		for _, f := range []field{
			{name: "revision", value: fmt.Sprint(w.Revision)},
			{name: "count", value: fmt.Sprint(len(w.Slots))},
			{name: "slots", value: places(w.Slots)},
			{name: "cpu", value: fmt.Sprintf("%dm", w.CPUMilli)},
			{name: "batch", value: fmt.Sprint(w.Batch)},
			{name: "key", value: fmt.Sprint(w.Key)},
			{name: "why", value: w.Why},
			{name: "short", value: w.Short},
			{name: "rank", value: w.Rank},
		} {
			f.function = w.Function
			all = append(all, f)
		}
	}
	for i := range p.Tables {
		t := &p.Tables[i]
		all = append(all, field{t.Stage, "table version", fmt.Sprint(t.Version)})
		for _, src := range t.Sources {
			all = append(all, field{t.Stage, "table from " + strconv.Quote(src.From), routed(t.Rows[src.Row])})
		}
	}
	for _, c := range p.Excluded {
		all = append(all, field{name: "excluded " + strings.Join(c, " > "), value: "true"})
	}
	for _, r := range p.Ruled {
		all = append(all, field{r.Domain, "policies", fmt.Sprintf("%+v", r)})
	}
	for _, w := range p.Warm {
		value := w.Warmth.String()
		if w.Key {
			value += ", key"
		}
		all = append(all, field{w.Function, "warm " + w.Node, value})
	}
	return all
}

// routed formats a row as LENGTH: LANE PART, …, backups …, overflow ….
func routed(r plan.Row) string {
	var levels []string
	for _, l := range r.Levels {
		text := fmt.Sprintf("%d:", l.MaxLength)
		for _, s := range l.Shares {
			text += fmt.Sprintf(" %s %v", s.Lane, s.Part)
		}
		if len(l.Backups) > 0 {
			text += ", backups " + strings.Join(l.Backups, " ")
		}
		if l.Overflow != "" {
			text += ", overflow " + l.Overflow
		}
		levels = append(levels, text)
	}
	return strings.Join(levels, "; ")
}

// places formats slots as REPLICA@NODE/DEVICE, with + for a new replica.
func places(all []plan.Slot) string {
	var out []string
	for _, s := range all {
		out = append(out, cmp.Or(s.Replica, "+")+"@"+s.Node+strings.TrimSuffix("/"+s.Device, "/"))
	}
	return strings.Join(out, " ")
}
