package problem

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/autoscaler/policy"
)

// MaxSteps is the largest number of decisions in a row.
const MaxSteps = 1000

// Decision is a decision about a problem, in words that others can read: functions have the names
// of the file, and times are in seconds.
type Decision struct {
	Step int     `json:"step"` // from 1
	At   float64 `json:"atSeconds"`
	Took float64 `json:"tookSeconds"` // how long the policies took, on the caller's clock

	Functions []Line      `json:"functions"` // sorted by name
	Tables    []Table     `json:"tables"`    // of stages with variants, sorted by stage
	Excluded  [][]string  `json:"excluded"`  // chains of functions that no table routes along
	Pipelines []Predicted `json:"pipelines"` // sorted by name
	Used      Used        `json:"used"`
	Warm      []Warm      `json:"warm"`
	// Policies that entry stages ask for, and what they disagree about.
	Ruled []Ruled `json:"ruled,omitempty"`
	Held  []Held  `json:"held"` // domains whose policy has failed
}

// Line is what is decided about a function, and what the model predicts for it.
type Line struct {
	Function string   `json:"function"`
	Stage    string   `json:"stage"`
	Count    int      `json:"count"`    // replicas with a place
	Nodes    []string `json:"nodes"`    // of each replica, with its device as NODE/DEVICE
	CPUMilli int      `json:"cpuMilli"` // limit per replica; 0: none
	Batch    int      `json:"batch"`    // largest batch
	Key      bool     `json:"key"`      // a key stage
	Rank     string   `json:"rank"`     // order of its line
	Why      string   `json:"why"`
	Short    string   `json:"short,omitempty"` // why fewer replicas have a place than were wanted

	Share    float64 `json:"share"`    // part of its stage's calls
	Accuracy float64 `json:"accuracy"` // of its answers
	Rate     float64 `json:"rate"`     // calls per second that the tables send here
	Busy     float64 `json:"busy"`     // utilisation: rate and service time over replicas' slots
	// Predicted mean wait, and mean wait and service together. 0 without calls or a service time.
	Wait    float64 `json:"waitSeconds"`
	Sojourn float64 `json:"sojournSeconds"`
}

// Table says to which functions the calls of a stage go.
type Table struct {
	Stage string `json:"stage"`
	Rows  []Row  `json:"rows"` // by source, then length
}

// Row is the part of a table for one source and the lengths up to one.
type Row struct {
	// From is "client", "join", or the function that made the input.
	From      string  `json:"from"`
	MaxLength int     `json:"maxLength"` // 0: any
	Shares    []Share `json:"shares"`
	// for calls whose function has no replica, the best first
	Backups  []string `json:"backups"`
	Overflow string   `json:"overflow,omitempty"` // for calls whose function is full
}

// Share is a function's part of a row's calls.
type Share struct {
	Function string  `json:"function"`
	Part     float64 `json:"part"`
}

// Used is what the replicas of a decision take.
type Used struct {
	Replicas int   `json:"replicas"`
	Budget   int   `json:"budget"`   // most replicas; 0: no bound
	CPUMilli int   `json:"cpuMilli"` // CPU requests
	Memory   int64 `json:"memory"`   // bytes
	Devices  int   `json:"devices"`  // with a replica
	Nodes    int   `json:"nodes"`    // with a replica
}

// Warm is a function's parameters on a node.
type Warm struct {
	Function string `json:"function"`
	Node     string `json:"node"`
	Warmth   string `json:"warmth"`
}

// Ruled is a domain whose entry stages ask for policies, and the policies in force.
type Ruled struct {
	Domain    string       `json:"domain"` // its first function
	Chosen    policy.Names `json:"chosen"` // allocator, rank and route
	Conflicts []Conflict   `json:"conflicts,omitempty"`
}

// Conflict means that entry stages of a domain ask for different policies of one level.
type Conflict struct {
	Level string   `json:"level"`
	Asked []string `json:"asked"`
	Kept  string   `json:"kept"` // the policy in force
}

// Held is a domain that keeps its replicas because its policy has failed.
type Held struct {
	Functions []string `json:"functions"`
	Error     string   `json:"error"`
}

// Decide makes steps decisions in a row, 1 to [MaxSteps], with the given policies. Each has the
// memory of the one before. From one to the next, the clock advances by Tick and nothing else
// changes: replicas, lines and measurements stay as the file has them. clock returns the time since
// any instant; it measures how long the policies take, and they do not see it.
func (p *Problem) Decide(names policy.Names, steps int, clock func() time.Duration) ([]Decision, error) {
	if steps < 1 || steps > MaxSteps {
		return nil, fmt.Errorf("steps: got %d, want 1 to %d", steps, MaxSteps)
	}
	set, err := names.Choose()
	if err != nil {
		return nil, err
	}
	var memory policy.Memory
	var out []Decision
	for i := range steps {
		s := p.at(i)
		began := clock()
		made, next, held, err := set.Decide(s, memory)
		took := clock() - began
		if err != nil {
			return out, fmt.Errorf("decision %d: %w", i+1, err)
		}
		memory = next
		d := Decision{Step: i + 1, At: s.At.Sub(begin).Seconds(), Took: took.Seconds(), Held: []Held{}}
		for _, h := range held {
			first, _, _ := strings.Cut(h.Err.Error(), "\n") // the rest is the stack of a panic
			d.Held = append(d.Held, Held{list(h.Domain.Functions), first})
		}
		p.describe(&d, &s, &made)
		out = append(out, d)
	}
	return out, nil
}

// at returns the snapshot of a step, from 0. Functions with demand had a call just before.
func (p *Problem) at(step int) plan.Snapshot {
	s := p.snapshot
	s.Rev, s.At = s.Rev+uint64(step), s.At.Add(time.Duration(step)*p.Tick)
	s.Functions = slices.Clone(s.Functions)
	for i := range s.Functions {
		for _, d := range []*plan.Demand{&s.Functions[i].Demand, &s.Functions[i].Stage} {
			if d.Rate > 0 {
				d.Last = s.At
			}
		}
	}
	return s
}

// list returns all, but never nil, so that its JSON is a list.
func list(all []string) []string { return append([]string{}, all...) }

// describe fills in d from a plan that was made from s.
func (p *Problem) describe(d *Decision, s *plan.Snapshot, made *plan.Plan) {
	m := newModel(p, s, made)
	d.Functions, d.Tables, d.Excluded, d.Warm = []Line{}, []Table{}, [][]string{}, []Warm{}
	for i := range made.Wants {
		d.Functions = append(d.Functions, m.line(&made.Wants[i]))
	}
	for i := range made.Tables {
		d.Tables = append(d.Tables, described(&made.Tables[i]))
	}
	for _, c := range made.Excluded {
		d.Excluded = append(d.Excluded, list(c))
	}
	for _, w := range made.Warm {
		d.Warm = append(d.Warm, Warm{w.Function, w.Node, w.Warmth.String()})
	}
	for _, r := range made.Ruled {
		out := Ruled{Domain: r.Domain, Chosen: policy.Names{Allocator: r.Chosen.Allocator, Rank: r.Chosen.Rank, Route: r.Chosen.Route}}
		for _, c := range r.Conflicts {
			out.Conflicts = append(out.Conflicts, Conflict(c))
		}
		d.Ruled = append(d.Ruled, out)
	}
	d.Pipelines = m.predict()
	d.Used = usedBy(s, made.Wants)
}

// described returns a table in the words of the file.
func described(t *plan.Table) Table {
	out := Table{Stage: t.Stage}
	for _, src := range t.Sources {
		from := src.From
		switch src.From {
		case plan.FromClient:
			from = "client"
		case plan.FromJoin:
			from = "join"
		}
		for _, l := range t.Rows[src.Row].Levels {
			r := Row{From: from, MaxLength: l.MaxLength, Backups: list(l.Backups)}
			if l.Overflow != "" {
				r.Overflow = l.Overflow
			}
			for _, x := range l.Shares {
				r.Shares = append(r.Shares, Share{x.Lane, x.Part})
			}
			out.Rows = append(out.Rows, r)
		}
	}
	return out
}

// usedBy returns what the slots of wants take.
func usedBy(s *plan.Snapshot, wants []plan.Want) Used {
	out := Used{Budget: s.Budget}
	nodes, devices := map[string]bool{}, map[plan.Slot]bool{}
	for _, w := range wants {
		f, _ := s.Function(w.Function) // the plan is valid
		out.Replicas += len(w.Slots)
		out.CPUMilli += len(w.Slots) * f.CPUMilli
		out.Memory += int64(len(w.Slots)) * f.Memory
		for _, slot := range w.Slots {
			nodes[slot.Node] = true
			for _, id := range slot.Devices() {
				devices[plan.Slot{Node: slot.Node, Device: id}] = true
			}
		}
	}
	out.Nodes, out.Devices = len(nodes), len(devices)
	return out
}
