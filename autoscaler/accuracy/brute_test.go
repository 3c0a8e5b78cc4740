package accuracy

// brute finds the best plan by trying all of them.
type brute struct {
	p    *Problem
	best []float64
	// counts and batches of the plan that is tried, by stage and variant
	counts, batches [8][8]int
}

// choose tries all replicas and batches of the variants from one on. left is the budget.
func (b *brute) choose(stage, variant, left int) {
	if stage == len(b.p.Stages) {
		b.try()
		return
	}
	if variant == len(b.p.Stages[stage].Variants) {
		b.choose(stage+1, 0, left)
		return
	}
	for n := 0; n <= left; n++ {
		b.counts[stage][variant] = n
		batches := len(b.p.Stages[stage].Variants[variant].Batches)
		if n == 0 {
			batches = 1
		}
		for k := range batches {
			b.batches[stage][variant] = k
			b.choose(stage, variant+1, left-n)
		}
	}
}

// try compares the plan with the best one. Its columns are assignments of a variant to every stage,
// unlike those of the solver.
func (b *brute) try() {
	p, pipe := b.p, &b.p.Pipelines[0]
	var rows [][]float64 // of each column: its entries by row
	var value []float64
	index := map[[2]int]int{}
	var right []float64
	for i := range p.Stages {
		for k := range p.Stages[i].Variants {
			index[[2]int{i, k}] = len(right)
			right = append(right, float64(b.counts[i][k]))
		}
	}
	right = append(right, 1, 0)
	var assign func(at int, chosen []int)
	assign = func(at int, chosen []int) {
		if at < len(p.Stages) {
			for k := range p.Stages[at].Variants {
				if b.counts[at][k] > 0 {
					assign(at+1, append(chosen[:at:at], k))
				}
			}
			return
		}
		col := make([]float64, len(right))
		items, times, good := make([]float64, at), make([]float64, at), make([]float64, at)
		depth, leaf := make([]int, at), make([]bool, at)
		for i := range at { // a stage comes after the one before it
			from := -1
			items[i], good[i], leaf[i] = 1, 1, true
			for _, s := range pipe.Steps {
				if s.To == i {
					from = s.From
					items[i] = items[from] * p.Stages[from].Variants[chosen[from]].Factor * s.Branch
				}
			}
			v := &p.Stages[i].Variants[chosen[i]]
			batch := v.Batches[b.batches[i][chosen[i]]]
			times[i], good[i], depth[i] = batch.Time, v.Accuracy, 1
			if from >= 0 {
				leaf[from] = false
				times[i], good[i], depth[i] = times[i]+times[from], good[i]*good[from], depth[i]+depth[from]
			}
			col[index[[2]int{i, chosen[i]}]] = pipe.Demand * items[i] * batch.Time / float64(batch.Size)
		}
		sum, leaves := 0.0, 0
		for i := range at {
			if leaf[i] {
				if times[i]/(1-pipe.Queueing)+pipe.Hop*float64(depth[i]) > pipe.Objective*(1+1e-12) {
					return
				}
				sum, leaves = sum+good[i], leaves+1
			}
		}
		col[len(right)-2], col[len(right)-1] = 1, pipe.MinAccuracy-sum/float64(leaves)
		rows, value = append(rows, col), append(value, sum/float64(leaves))
	}
	assign(0, nil)
	x := maximise(rows, value, right)
	cost := []float64{0, 0, 0, 0}
	for j, v := range x {
		cost[0] -= v
		cost[1] -= v * value[j]
	}
	for i := range p.Stages {
		for k := range p.Stages[i].Variants {
			n := b.counts[i][k]
			cost[2] += float64(n)
			cost[3] += float64(max(n-p.Stages[i].Variants[k].Running, p.Stages[i].Variants[k].Running-n))
		}
	}
	for g := range b.best {
		if cost[g] > b.best[g]+1e-7 {
			return
		}
		if cost[g] < b.best[g]-1e-7 {
			copy(b.best, cost)
			return
		}
	}
}

// maximise returns the x that maximises the sum of x, and then value·x, within the rows. It is a
// textbook tableau with Bland's rule.
func maximise(cols [][]float64, value, right []float64) []float64 {
	n, m := len(cols), len(right)
	t := make([][]float64, m+1)
	for i := range t {
		t[i] = make([]float64, n+m+1)
		for j := range cols {
			if i < m {
				t[i][j] = cols[j][i]
			} else {
				t[i][j] = 1e5 + value[j]
			}
		}
		if i < m {
			t[i][n+i], t[i][n+m] = 1, right[i]
		}
	}
	basis := make([]int, m)
	for i := range basis {
		basis[i] = n + i
	}
	for {
		in, out := -1, -1
		for j := 0; j < n+m && in < 0; j++ {
			if t[m][j] > 1e-8 {
				in = j
			}
		}
		if in < 0 {
			break
		}
		for i := range m {
			if t[i][in] <= 1e-10 {
				continue
			}
			if out < 0 || t[i][n+m]*t[out][in] < t[out][n+m]*t[i][in]-1e-14 ||
				t[i][n+m]*t[out][in] <= t[out][n+m]*t[i][in]+1e-14 && basis[i] < basis[out] {
				out = i
			}
		}
		by := t[out][in]
		for j := range t[out] {
			t[out][j] /= by
		}
		for i := range t {
			if f := t[i][in]; i != out && f != 0 {
				for j := range t[i] {
					t[i][j] -= f * t[out][j]
				}
			}
		}
		basis[out] = in
	}
	x := make([]float64, n)
	for i, j := range basis {
		if j < n {
			x[j] = t[i][n+m]
		}
	}
	return x
}
