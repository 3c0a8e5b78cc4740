package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/stagecoach-serving/stagecoach/control/cluster"
)

// timeline is a function's present and recent past, as GET /system/timeline/NAME answers.
type timeline struct {
	Function string  `json:"function"`
	Waiting  int     `json:"waiting"` // requests in its line
	Running  int     `json:"running"` // requests on replicas
	Ready    int     `json:"ready"`   // replicas
	Why      string  `json:"why"`     // the last decision on its size
	Events   []event `json:"events"`  // the latest ones, in order
}

// event is a step in a replica's life.
type event struct {
	At      time.Time         `json:"at"`
	Replica string            `json:"replica"`
	Kind    string            `json:"kind"` // as package cluster has them
	Path    string            `json:"path,omitempty"`
	Phases  map[string]string `json:"phases,omitempty"` // started: how long each phase took
	Cause   string            `json:"cause,omitempty"`
}

func (c *client) timeline(ctx context.Context, function string) (timeline, error) {
	var t timeline
	return t, c.get(ctx, "/system/timeline/"+function, &t)
}

// replicaStart is how a replica came up, each time counted from its order.
type replicaStart struct {
	replica  string
	path     string
	loaded   bool // its parameters, first
	ready    time.Duration
	answered time.Duration // 0: not yet
}

// replicaStarts puts the events of each replica together, in the order of their orders.
func replicaStarts(events []event) []replicaStart {
	var out []replicaStart
	ordered := map[string]time.Time{}
	for _, e := range events {
		if e.Kind == string(cluster.Ordered) {
			ordered[e.Replica] = e.At
			out = append(out, replicaStart{replica: e.Replica})
			continue
		}
		i := slices.IndexFunc(out, func(r replicaStart) bool { return r.replica == e.Replica })
		if i < 0 {
			continue
		}
		since := e.At.Sub(ordered[e.Replica])
		switch e.Kind {
		case string(cluster.Process):
			out[i].path, out[i].loaded = e.Path, e.Phases["load"] != ""
		case string(cluster.Ready):
			out[i].ready = since
		case string(cluster.Answered):
			out[i].answered = since
		}
	}
	return out
}

func writeStarts(w io.Writer, starts []replicaStart) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "replica\tpath\torder to ready\torder to first answer\t\n")
	for _, r := range starts {
		answered := "-"
		if r.answered > 0 {
			answered = fmt.Sprintf("%.1f ms", r.answered.Seconds()*1e3)
		}
		fmt.Fprintf(t, "%s\t%s\t%.1f ms\t%s\t\n", r.replica, r.path, r.ready.Seconds()*1e3, answered)
	}
	return t.Flush()
}
