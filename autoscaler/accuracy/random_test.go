package accuracy

import "math/rand/v2"

// random returns a problem drawn from a seed. Larger sizes make more stages, variants and replicas.
func random(seed uint64, small bool) *Problem {
	r := rand.New(rand.NewPCG(seed, 26))
	stages, variants, batches, replicas := 1+r.IntN(4), 2+r.IntN(7), 1+r.IntN(5), 5+r.IntN(96)
	if small {
		stages, variants, batches, replicas = 1+r.IntN(3), 2, 1+r.IntN(2), 2+r.IntN(3)
	}
	p := &Problem{Replicas: replicas}
	for i := range stages {
		st := Stage{Name: string(rune('a' + i))}
		time, accuracy := 0.004+0.02*r.Float64(), 0.5+0.3*r.Float64()
		for k := range 1 + r.IntN(variants) {
			v := Variant{Name: string(rune('0' + k)), Accuracy: accuracy, Factor: 1}
			if i+1 < stages && r.IntN(2) == 0 {
				v.Factor = 0.5 + 2.5*r.Float64()
			}
			fixed := 0.2 + 0.6*r.Float64()
			for b := range batches {
				size := 1 << b
				v.Batches = append(v.Batches, Batch{Size: size, Time: time * (fixed + (1-fixed)*float64(size))})
			}
			st.Variants = append(st.Variants, v)
			time *= 1.1 + r.Float64()
			accuracy += (1 - accuracy) * 0.5 * r.Float64()
		}
		p.Stages = append(p.Stages, st)
	}
	pipe := Pipeline{Name: "p", Queueing: HalfForQueueing, Hop: 0.001}
	tree := r.IntN(2) == 0
	for i := 1; i < stages; i++ {
		from := i - 1
		if tree {
			from = r.IntN(i)
		}
		pipe.Steps = append(pipe.Steps, Step{From: from, To: i, Branch: []float64{1, 0.5, 1.5}[r.IntN(3)]})
	}
	p.Pipelines = []Pipeline{pipe}
	// The objective leaves room for some chains; the demand is from a tenth to twice what full
	// accuracy carries.
	slow, need := 0.0, 0.0
	for i := range p.Stages {
		v := &p.Stages[i].Variants[len(p.Stages[i].Variants)-1]
		slow += v.Batches[0].Time
		need += 1 / v.Batches[len(v.Batches)-1].rate()
	}
	p.Pipelines[0].Objective = 2*slow*(0.6+2.5*r.Float64()) + 0.001*float64(stages)
	p.Pipelines[0].Demand = float64(replicas) / need * (0.1 + 2.4*r.Float64()*r.Float64())
	if r.IntN(5) == 0 {
		p.Pipelines[0].MinAccuracy = 0.3 + 0.4*r.Float64()
	}
	if r.IntN(3) == 0 {
		p.CountChanges = true
		for i := range p.Stages {
			for k := range p.Stages[i].Variants {
				p.Stages[i].Variants[k].Running = r.IntN(1 + replicas/4)
			}
		}
	}
	return p
}
