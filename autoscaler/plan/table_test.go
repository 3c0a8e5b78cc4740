package plan

import (
	"errors"
	"strings"
	"testing"
)

func TestTableKeepsEqualRowsOnce(t *testing.T) {
	t.Parallel()
	even := Row{Levels: []Level{{Shares: []Share{{"a", 0.5}, {"b", 0.5}}}}}
	long := Row{Levels: []Level{{MaxLength: 64, Shares: []Share{{"b", 1}}}, {Shares: []Share{{"a", 1}}}}}
	table := NewTable("a", 1, map[string]Row{FromClient: even, "x": even, "y": long, FromJoin: long})
	if len(table.Rows) != 2 || len(table.Sources) != 4 {
		t.Fatalf("got %d rows and %d sources, want 2 and 4", len(table.Rows), len(table.Sources))
	}
	for from, want := range map[string]string{FromClient: "a b", "x": "a b", "unknown": "a b", "y": "a b"} {
		if got := strings.Join(table.Row(from).Lanes(), " "); got != want {
			t.Errorf("lanes from %q: %s, want %s", from, got, want)
		}
	}
	for length, want := range map[int]string{64: "b", 65: "a", 0: "a"} {
		if l, ok := table.Row("y").Level(length); !ok || l.Shares[0].Lane != want {
			t.Errorf("length %d goes to %v, want %s", length, l, want)
		}
	}
	if _, ok := (&Row{Levels: long.Levels[:1]}).Level(65); ok {
		t.Error("a length above all levels has a level")
	}
}

func TestFaultsOfTablesAreNamed(t *testing.T) {
	t.Parallel()
	row := func(l ...Level) map[string]Row { return map[string]Row{FromClient: {Levels: l}} }
	whole := []Share{{"a", 1}}
	for name, c := range map[string]struct {
		rows map[string]Row
		want string
	}{
		"sound":        {row(Level{Shares: whole, Backups: []string{"b"}, Overflow: "b"}), ""},
		"no client":    {map[string]Row{"x": {Levels: []Level{{Shares: whole}}}}, "no row for requests that enter here"},
		"no level":     {row(), "no level"},
		"sum":          {row(Level{Shares: []Share{{"a", 0.5}, {"b", 0.4}}}), "sum is 0.9"},
		"negative":     {row(Level{Shares: []Share{{"a", 2}, {"b", -1}}}), "share -1"},
		"unknown lane": {row(Level{Shares: []Share{{"c", 1}}}), `lane "c"`},
		"overflow":     {row(Level{Shares: whole, Overflow: "c"}), `lane "c"`},
		"order":        {row(Level{MaxLength: 64, Shares: whole}, Level{MaxLength: 32, Shares: whole}), "ascending"},
		"any not last": {row(Level{Shares: whole}, Level{MaxLength: 32, Shares: whole}), "ascending"},
	} {
		table := NewTable("a", 1, c.rows)
		err := errors.Join(table.faults([]string{"a", "b"})...)
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%s: got %v, want %q", name, err, c.want)
		}
	}
}
