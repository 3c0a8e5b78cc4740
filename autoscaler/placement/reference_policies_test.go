package placement_test

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/placement"
	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
)

type Dispersed struct{}

func (Dispersed) Place(s plan.Snapshot, a plan.Alloc) ([]plan.Want, error) {
	p, err := begin(&s, a)
	if err != nil {
		return nil, err
	}
	key := make([]bool, len(a))
	for i, l := range a {
		key[i] = l.Key || l.Count > max(p.lines[i].Min, 1)
		for _, slot := range p.wants[i].Slots {
			if key[i] {
				p.byName[slot.Node].load++
			}
		}
	}
	pack := func(f *function, x, y *node) int {
		return cmp.Or(
			cmp.Compare(x.of[f.i].replicas, y.of[f.i].replicas),
			prefer(x.of[f.i].zygote, y.of[f.i].zygote),
			cmp.Compare(x.free, y.free),
			cmp.Compare(x.Name, y.Name),
		)
	}
	p.rounds(func(round int) {
		for _, i := range p.order(round, key) {
			if !key[i] {
				p.add(i, pack)
				continue
			}
			p.lines[i].urgent = pressing(p.lines[i].Function, len(p.wants[i].Slots))
			if slot, ok := p.add(i, disperse); ok {
				p.byName[slot.Node].load++
			}
		}
	})
	p.level(key)
	return p.wants, nil
}

func disperse(f *function, x, y *node) int {
	return cmp.Or(
		warmer(f, x, y),
		cmp.Compare(x.load, y.load),
		prefer(x.of[f.i].zygote, y.of[f.i].zygote),
		cmp.Compare(x.of[f.i].replicas, y.of[f.i].replicas),
		cmp.Compare(y.free, x.free),
		cmp.Compare(x.Name, y.Name),
	)
}

func warmer(f *function, x, y *node) int {
	if !f.urgent {
		return 0
	}
	return cmp.Or(cmp.Compare(y.of[f.i].warm, x.of[f.i].warm), prefer(!x.hasAll(f), !y.hasAll(f)))
}

func (n *node) hasAll(f *function) bool { return f.replicas > 0 && n.of[f.i].replicas == f.replicas }

func pressing(f *plan.Function, has int) bool {
	if f.Waiting+f.Running == 0 || has > 0 && has < f.Min {
		return false
	}
	saved, known := saving(f)
	return !known || saved > f.Service.Mean
}

func saving(f *plan.Function) (saved time.Duration, known bool) {
	var cold, warm time.Duration
	for _, s := range f.Starts {
		if s.Path == "cold" {
			cold = s.Mean
		} else {
			warm = max(warm, s.Mean)
		}
	}
	return cold - warm, cold > 0 && warm > 0
}

func (p *placing) order(round int, key []bool) []int {
	lines := p.wanting(round)
	fits := make(map[int]int, len(lines))
	for _, i := range lines {
		for _, n := range p.nodes {
			if key[i] && n.fits(p.lines[i]) {
				fits[i]++
			}
		}
	}
	slices.SortStableFunc(lines, func(x, y int) int { return cmp.Or(prefer(key[x], key[y]), cmp.Compare(fits[x], fits[y])) })
	return lines
}

func (p *placing) level(key []bool) {
	for moved := true; moved; {
		moved = false
		for i := range p.wants {
			for k := 0; key[i] && k < len(p.wants[i].Slots); k++ {
				from := p.wants[i].Slots[k]
				if from.Replica != "" {
					continue
				}
				f, left := p.lines[i], p.byName[from.Node]
				f.urgent = pressing(f.Function, k)
				to, ok := p.take(f, disperse, func(n *node) bool {
					together := f.replicas > 1 && n.of[f.i].replicas+1 == f.replicas
					return n.load+1 < left.load && (!f.urgent || !together && n.of[f.i].warm >= left.of[f.i].warm)
				})
				if !ok {
					continue
				}
				left.of[f.i].replicas--
				f.replicas--
				left.load--
				p.byName[to.Node].load++
				p.wants[i].Slots[k], moved = to, true
			}
		}
	}
}

const fewest = 4

func (c *cluster) ahead(wants []plan.Want, l *list) {
	quiet := c.settle()
	for _, key := range []bool{true, false} {
		turns := c.growing(wants, key)
		for len(turns) > 0 {
			turns = slices.DeleteFunc(turns, func(f *function) bool {
				n := f.next(quiet, key)
				if n == nil {
					return true
				}
				if !n.of[f.i].zygote {
					n.loading = true
					f.homes = append(f.homes, n)
				}
				l.add(f, n, key)
				n.occupy(f, plan.Slot{Node: n.Name, Device: strings.Join(n.pick(f), ",")})
				n.load++
				f.ahead++
				return f.ahead >= f.more
			})
		}
	}
}

func (c *cluster) settle() (quiet []*node) {
	for _, n := range c.nodes {
		for i := range n.of {
			if n.of[i].zygote {
				c.functions[i].homes = append(c.functions[i].homes, n)
			}
			n.loading = n.loading || n.of[i].warm == coming
		}
		if !n.loading && n.Unavailable == "" {
			quiet = append(quiet, n)
		}
	}
	return quiet
}

func (c *cluster) growing(wants []plan.Want, key bool) (turns []*function) {
	for _, w := range wants {
		f, ok := c.function(w.Function)
		if !ok || f.zygote == 0 || len(w.Slots) == 0 || key && !w.Key || !key && !f.gains() {
			continue
		}
		f.more = len(w.Slots)
		if !key {
			f.more = max(f.more, fewest)
		}
		if f.more = min(f.more, f.Max-len(w.Slots)); f.ahead < f.more {
			turns = append(turns, f)
		}
	}
	return turns
}

func (f *function) gains() bool {
	saved, known := saving(f.Function)
	return f.Failing.Count == 0 && (!known || saved > f.Service.Mean)
}

func (f *function) next(quiet []*node, key bool) *node {
	has := first(f, f.homes, func(n *node) bool { return !n.hasAll(f) && n.hasRoomWhereLoaded(f) })
	given := first(f, quiet, func(n *node) bool { return (has == nil || n.load < has.load) && n.takes(f) && n.calm(f) })
	if given != nil {
		return given
	}
	if has != nil {
		return has
	}
	has = first(f, f.homes, func(n *node) bool { return n.hasRoomWhereLoaded(f) })
	if has == nil && key {
		return first(f, quiet, func(n *node) bool { return n.takes(f) })
	}
	return has
}

func first(f *function, nodes []*node, may func(*node) bool) (most *node) {
	for _, n := range nodes {
		if may(n) && (most == nil || disperse(f, n, most) < 0) {
			most = n
		}
	}
	return most
}

func (n *node) hasRoomWhereLoaded(f *function) bool {
	return n.fits(f) && (n.of[f.i].listed || n.hasRoomToLoad(f))
}

func (n *node) takes(f *function) bool { return !n.loading && n.hasRoomToLoad(f) && n.fits(f) }

func (n *node) hasRoomToLoad(f *function) bool {
	return n.free-n.reserve >= max(n.cost(f), 1)
}

func (n *node) calm(f *function) bool {
	return n.Memory-n.free+n.cost(f) <= (n.Memory-n.reserve)/2
}

type KeyStages struct{}

func (KeyStages) Warm(s plan.Snapshot, wants []plan.Want) ([]plan.Warm, error) {
	c := look(&s)
	l := c.list(wants)
	for _, w := range wants { // memory for new replicas is not available for sleeping functions
		f, ok := c.function(w.Function)
		if !ok {
			continue
		}
		key := placement.Key(f.Function, w)
		for _, slot := range w.Slots {
			n := c.byName[slot.Node]
			if n == nil {
				continue
			}
			if slot.Replica == "" {
				n.occupy(f, slot)
			} else {
				n.keeps(f)
			}
			n.load++
			l.add(f, n, key)
		}
		for i := range f.Replicas {
			if n := c.byName[f.Replicas[i].Node]; n != nil {
				l.add(f, n, key)
			}
		}
	}
	for _, w := range wants {
		f, ok := c.function(w.Function)
		if !ok || !f.Zero || len(w.Slots) > 0 || len(f.Replicas) > 0 {
			continue
		}
		if n := c.sleepNode(f); n != nil {
			if !n.of[f.i].zygote {
				n.free -= n.cost(f)
			}
			l.add(f, n, w.Key)
		}
	}
	c.ahead(wants, l)
	return l.warm(), nil
}

type list struct {
	*cluster
	nodes   []*node // by name
	entries []uint64
}

func (c *cluster) list(wants []plan.Want) *list {
	l := &list{cluster: c, nodes: slices.Clone(c.nodes)}
	slices.SortFunc(l.nodes, func(x, y *node) int { return cmp.Compare(x.Name, y.Name) })
	for i, n := range l.nodes {
		n.rank = i
	}
	slots := 0
	for i := range wants {
		slots += len(wants[i].Slots)
	}
	l.entries = make([]uint64, 0, 2*slots)
	return l
}

func (l *list) add(f *function, n *node, key bool) {
	is := &n.of[f.i]
	if is.listed {
		return
	}
	is.listed = true
	e := uint64(f.i)<<32 | uint64(n.rank)<<1
	if key {
		e |= 1
	}
	l.entries = append(l.entries, e)
}

func (l *list) warm() []plan.Warm {
	slices.Sort(l.entries)
	warm := make([]plan.Warm, len(l.entries))
	for i, e := range l.entries {
		warm[i] = plan.Warm{Function: l.functions[e>>32].Name, Node: l.nodes[uint32(e)>>1].Name, Warmth: plan.Host, Key: e&1 != 0}
	}
	return warm
}

func (c *cluster) sleepNode(f *function) *node {
	var best *node
	for _, n := range c.nodes {
		if n.Unavailable != "" || !n.of[f.i].zygote && !n.hasRoomToLoad(f) {
			continue
		}
		if best == nil || cmp.Or(prefer(n.of[f.i].zygote, best.of[f.i].zygote), cmp.Compare(best.free, n.free), cmp.Compare(n.Name, best.Name)) < 0 {
			best = n
		}
	}
	return best
}
