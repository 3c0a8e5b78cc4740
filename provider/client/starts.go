package client

import (
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/stagecoach-serving/stagecoach/provider/schema"
)

// Timeline returns a function's present and recent past.
func (c *Client) Timeline(ctx context.Context, function string) (schema.Timeline, error) {
	var t schema.Timeline
	return t, c.Get(ctx, "/system/timeline/"+function, &t)
}

// ReplicaStart is how a replica came up. Its times are counted from its order.
type ReplicaStart struct {
	Replica  string
	Path     string
	Loaded   bool // its parameters, first
	Ready    time.Duration
	Answered time.Duration // 0: not yet
}

// ReplicaStarts puts the events of each replica together, in the order of their orders.
func ReplicaStarts(events []schema.Event) []ReplicaStart {
	var out []ReplicaStart
	ordered := map[string]time.Time{}
	for _, e := range events {
		if e.Kind == schema.Ordered {
			ordered[e.Replica] = e.At
			out = append(out, ReplicaStart{Replica: e.Replica})
			continue
		}
		i := slices.IndexFunc(out, func(r ReplicaStart) bool { return r.Replica == e.Replica })
		if i < 0 {
			continue
		}
		since := e.At.Sub(ordered[e.Replica])
		switch e.Kind {
		case schema.Process:
			out[i].Path, out[i].Loaded = e.Path, e.Phases["load"] != ""
		case schema.Ready:
			out[i].Ready = since
		case schema.Answered:
			out[i].Answered = since
		}
	}
	return out
}

// WriteStarts prints a table of starts.
func WriteStarts(w io.Writer, starts []ReplicaStart) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "replica\tpath\torder to ready\torder to first answer\t\n")
	for _, r := range starts {
		answered := "-"
		if r.Answered > 0 {
			answered = fmt.Sprintf("%.1f ms", r.Answered.Seconds()*1e3)
		}
		fmt.Fprintf(t, "%s\t%s\t%.1f ms\t%s\t\n", r.Replica, r.Path, r.Ready.Seconds()*1e3, answered)
	}
	return t.Flush()
}
