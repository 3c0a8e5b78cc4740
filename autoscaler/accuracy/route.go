package accuracy

import (
	"cmp"
	"slices"
)

// Routes is where the requests of each stage go.
type Routes struct {
	Routes []Route
	// Backups are, by stage, the variants that have capacity left, the most accurate first.
	Backups [][]int
	// Spare is, by stage and variant, the capacity that is left, in items per second.
	Spare [][]float64
	// Overflow is, by stage, the items per second for which no variant has capacity.
	Overflow []float64
}

// Route is where the items from one source go at a stage.
type Route struct {
	Stage       int
	From        int // the stage before; -1: they come from clients
	FromVariant int
	Items       float64 // per second
	Shares      []Share // above 0, the most accurate variant first
	Overflow    float64 // the part for which no variant has capacity: 1 - the sum of Shares
}

// Share is the part of a route's items that a variant gets.
type Share struct {
	Variant int
	Part    float64
}

// MostAccurateFirst makes routes from a plan's replicas and the present demand and factors of p. At
// each stage, items go to the most accurate variant that has capacity and is in time behind the
// variants before. Items from more accurate variants choose first. It is Algorithm 1 of the paper
// with the entry's demand, the backups and the overflow, which the paper leaves out.
//
// The method is a heuristic: it does not see that a variant which returns fewer items would make
// the next stages' answers better. [Problem.Solve] does.
func MostAccurateFirst(p *Problem, counts [][]Count) *Routes {
	r := routing{p: p, counts: counts, out: &Routes{
		Backups: make([][]int, len(p.Stages)), Spare: make([][]float64, len(p.Stages)), Overflow: make([]float64, len(p.Stages)),
	}}
	r.begin()
	for _, stage := range r.order {
		r.route(stage)
	}
	for i := range p.Stages {
		for _, k := range r.best[i] {
			if r.out.Spare[i][k] > flowTol {
				r.out.Backups[i] = append(r.out.Backups[i], k)
			}
		}
	}
	return r.out
}

// routing is a MostAccurateFirst under way.
type routing struct {
	p      *Problem
	counts [][]Count
	out    *Routes
	order  []int   // stages, each after those before it
	best   [][]int // variants by stage, the most accurate first
	flow   [][]float64
	time   [][]float64 // by stage and variant: of a batch
	head   [][]float64 // by stage and variant: the longest time from the entry to its end
}

// begin sets what is known before the first stage.
func (r *routing) begin() {
	n, width := len(r.p.Stages), 0
	for i := range r.p.Stages {
		width += len(r.p.Stages[i].Variants)
	}
	numbers, ints := make([]float64, (3+len(r.p.Pipelines))*width), make([]int, 0, width+n)
	cut := func(k int) []float64 {
		out := numbers[:k:k]
		numbers = numbers[k:]
		return out
	}
	r.best, r.time, r.head = make([][]int, n), make([][]float64, n), make([][]float64, n)
	r.flow = make([][]float64, n*len(r.p.Pipelines))
	for i := range r.p.Stages {
		vs := r.p.Stages[i].Variants
		r.out.Spare[i], r.time[i], r.head[i] = cut(len(vs)), cut(len(vs)), cut(len(vs))
		at := len(ints)
		for k := range vs {
			batch := vs[k].Batches[r.counts[i][k].Batch]
			r.out.Spare[i][k] = float64(r.counts[i][k].Replicas) * batch.rate()
			r.time[i][k] = batch.Time
			ints = append(ints, k)
		}
		r.best[i] = ints[at:len(ints):len(ints)]
		slices.SortStableFunc(r.best[i], func(a, b int) int { return cmp.Compare(vs[b].Accuracy, vs[a].Accuracy) })
		for pipe := range r.p.Pipelines {
			r.flow[pipe*n+i] = cut(len(vs))
		}
	}
	r.sort(ints[len(ints):])
}

// sort puts stages behind those before them. Stages on cycles of several pipelines come last.
func (r *routing) sort(into []int) {
	r.order = into
	placed := make([]bool, len(r.p.Stages))
	for len(r.order) < len(placed) {
		next := -1
		for i := range placed {
			if placed[i] {
				continue
			}
			if next < 0 {
				next = i
			}
			if !slices.ContainsFunc(r.p.Pipelines, func(p Pipeline) bool {
				return slices.ContainsFunc(p.Steps, func(s Step) bool { return s.To == i && !placed[s.From] })
			}) {
				next = i
				break
			}
		}
		placed[next] = true
		r.order = append(r.order, next)
	}
}

// route routes all items of a stage. The items of a source are those of all pipelines.
func (r *routing) route(stage int) {
	entry := 0.0
	for i := range r.p.Pipelines {
		if p := &r.p.Pipelines[i]; p.Root == stage {
			entry += p.Demand
		}
	}
	if entry > 0 {
		r.from(stage, -1, -1, entry)
	}
	for from := range r.p.Stages {
		if !r.follows(from, stage) {
			continue
		}
		for _, k := range r.best[from] {
			items := 0.0
			for i := range r.p.Pipelines {
				items += r.items(i, from, k, stage)
			}
			if items > 0 {
				r.from(stage, from, k, items)
			}
		}
	}
}

// follows reports whether a step of a pipeline leads from one stage to the other.
func (r *routing) follows(from, to int) bool {
	for i := range r.p.Pipelines {
		for _, s := range r.p.Pipelines[i].Steps {
			if s.From == from && s.To == to {
				return true
			}
		}
	}
	return false
}

// items returns how many items per second of a pipeline a variant sends to a stage.
func (r *routing) items(pipe, from, variant, to int) float64 {
	for _, s := range r.p.Pipelines[pipe].Steps {
		if s.From == from && s.To == to {
			return r.flow[pipe*len(r.p.Stages)+from][variant] * s.items(&r.p.Stages[from].Variants[variant])
		}
	}
	return 0
}

// from routes the items of one source.
func (r *routing) from(stage, from, variant int, items float64) {
	route := Route{Stage: stage, From: from, FromVariant: variant, Items: items}
	left, before := items, 0.0
	if from >= 0 {
		before = r.head[from][variant]
	}
	for _, k := range r.best[stage] {
		room := r.out.Spare[stage][k]
		if room <= 0 || !r.inTime(stage, k, from, before) {
			continue
		}
		take := min(room, left)
		r.out.Spare[stage][k] -= take
		left -= take
		route.Shares = append(route.Shares, Share{k, take / items})
		r.head[stage][k] = max(r.head[stage][k], before+r.time[stage][k])
		if left <= items*flowTol {
			left = 0
			break
		}
	}
	route.Overflow = left / items
	r.out.Overflow[stage] += left
	r.out.Routes = append(r.out.Routes, route)
	for i := range r.p.Pipelines {
		of := 0.0
		switch p := &r.p.Pipelines[i]; {
		case from >= 0:
			of = r.items(i, from, variant, stage)
		case p.Root == stage:
			of = p.Demand
		}
		if of > 0 {
			for _, s := range route.Shares {
				r.flow[i*len(r.p.Stages)+stage][s.Variant] += of * s.Part
			}
		}
	}
}

// inTime reports whether a variant leaves enough time for the fastest ones with replicas behind it,
// in all pipelines on whose way it is.
func (r *routing) inTime(stage, variant, from int, before float64) bool {
	for i := range r.p.Pipelines {
		p := &r.p.Pipelines[i]
		if from < 0 && p.Root != stage || from >= 0 && !slices.ContainsFunc(p.Steps, func(s Step) bool { return s.From == from && s.To == stage }) {
			continue
		}
		tail, behind := r.tail(p, stage)
		depth := behind
		for at := stage; at >= 0; at = p.before(at) {
			depth++
		}
		if (before+r.time[stage][variant]+tail)/(1-p.Queueing)+p.Hop*float64(depth) > p.Objective*(1+roundOff) {
			return false
		}
	}
	return true
}

// tail returns the shortest time behind a stage on the slowest way to a leaf, and its stages.
func (r *routing) tail(p *Pipeline, stage int) (time float64, stages int) {
	for _, s := range p.Steps {
		if s.From != stage {
			continue
		}
		least := -1.0
		for k, c := range r.counts[s.To] {
			if t := r.time[s.To][k]; c.Replicas > 0 && (least < 0 || t < least) {
				least = t
			}
		}
		t, n := r.tail(p, s.To)
		time, stages = max(time, max(least, 0)+t), max(stages, n+1)
	}
	return time, stages
}

// before returns the stage before a stage; -1: none.
func (p *Pipeline) before(stage int) int {
	for _, s := range p.Steps {
		if s.To == stage {
			return s.From
		}
	}
	return -1
}

// Result returns the part of a pipeline's requests that the routes serve, and how accurately. A
// request counts as served in part if items of it overflow at some stages only.
func (r *Routes) Result(p *Problem, pipeline int) (served, accuracy float64) {
	pipe := &p.Pipelines[pipeline]
	t := tree{next: make([][]Step, len(p.Stages))}
	for _, s := range pipe.Steps {
		t.next[s.From] = append(t.next[s.From], s)
	}
	paths := t.paths(pipe.Root)
	for _, path := range paths {
		var walk func(at, variant int, part, good float64)
		walk = func(at, variant int, part, good float64) {
			if at == len(path) {
				served += part / float64(len(paths))
				accuracy += part * good / float64(len(paths))
				return
			}
			from := -1
			if at > 0 {
				from = path[at-1]
			}
			for _, x := range r.Routes {
				if x.Stage == path[at] && x.From == from && x.FromVariant == variant {
					for _, s := range x.Shares {
						walk(at+1, s.Variant, part*s.Part, good*p.Stages[path[at]].Variants[s.Variant].Accuracy)
					}
				}
			}
		}
		walk(0, -1, 1, 1)
	}
	if served > 0 {
		accuracy /= served
	}
	return served, accuracy
}

// Follows reports whether a step leads from one stage to the other.
func (p *Pipeline) Follows(from, to int) bool {
	return slices.ContainsFunc(p.Steps, func(s Step) bool { return s.From == from && s.To == to })
}

// InTime reports whether any chain with a variant of a stage, and a variant of the next stage, is
// in time with the batches of a plan.
func (p *Pipeline) InTime(stages []Stage, counts [][]Count, from, variant, to, next int) bool {
	time := func(stage, k int) float64 { return stages[stage].Variants[k].Batches[counts[stage][k].Batch].Time }
	fastest := func(stage int) float64 {
		least := time(stage, 0)
		for k := range stages[stage].Variants {
			least = min(least, time(stage, k))
		}
		return least
	}
	sum, depth := time(from, variant)+time(to, next), 2
	for at := p.before(from); at >= 0; at = p.before(at) {
		sum, depth = sum+fastest(at), depth+1
	}
	var tail func(stage int) (float64, int)
	tail = func(stage int) (most float64, deep int) {
		for _, s := range p.Steps {
			if s.From == stage {
				t, n := tail(s.To)
				most, deep = max(most, fastest(s.To)+t), max(deep, n+1)
			}
		}
		return most, deep
	}
	behind, n := tail(to)
	return (sum+behind)/(1-p.Queueing)+p.Hop*float64(depth+n) <= p.Objective*(1+roundOff)
}
