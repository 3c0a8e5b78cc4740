package plan

import "slices"

// Domains splits the snapshot's functions into sets that must be decided together. Two functions
// are in one domain if a chain of pipelines with shared functions connects them. A variant is in
// the domain of its stage, even if the stage's own function is not deployed. A function outside all
// pipelines, without variants, is its own domain. Stages that are not deployed are left out.
// Domains are sorted by their first function.
func Domains(s Snapshot) []Domain {
	of, first := connect(&s)
	var domains []Domain
	at := make([]int, len(s.Functions)) // index in domains, by leader
	size := make([]int, len(s.Functions))
	for i := range s.Functions {
		size[of.find(i)]++
	}
	for i := range s.Functions {
		l := of.find(i)
		if l == i {
			at[i] = len(domains)
			domains = append(domains, Domain{Functions: make([]string, 0, size[i])})
		}
		domains[at[l]].Functions = append(domains[at[l]].Functions, s.Functions[i].Name)
	}
	for p, pipe := range s.Pipelines {
		if first[p] >= 0 {
			d := &domains[at[of.find(first[p])]]
			d.Pipelines = append(d.Pipelines, pipe.Name)
		}
	}
	for i := range domains {
		slices.Sort(domains[i].Functions)
		slices.Sort(domains[i].Pipelines)
	}
	return domains
}

// union is a union-find over the functions' indices. The smallest index of a set leads it.
type union []int

func (u union) find(i int) int {
	for u[i] != i {
		u[i] = u[u[i]]
		i = u[i]
	}
	return i
}

func (u union) join(i, k int) {
	a, b := u.find(i), u.find(k)
	u[max(a, b)] = min(a, b)
}

// connect joins the functions of each domain. first has a function of each pipeline; -1: none is
// deployed.
func connect(s *Snapshot) (of union, first []int) {
	of = make(union, len(s.Functions))
	index := make(map[string]int, len(s.Functions))
	variants := false
	for i := range s.Functions {
		of[i], index[s.Functions[i].Name] = i, i
		variants = variants || s.Functions[i].VariantOf != ""
	}
	for i := 0; variants && i < len(s.Functions); i++ {
		stage := s.Functions[i].VariantOf
		if stage == "" {
			continue
		}
		if k, ok := index[stage]; ok {
			of.join(i, k)
		} else {
			index[stage] = i // its first variant stands for a stage that is not deployed
		}
	}
	first = make([]int, len(s.Pipelines))
	for p, pipe := range s.Pipelines {
		first[p] = -1
		for _, stage := range pipe.Stages {
			i, ok := index[stage]
			switch {
			case !ok:
			case first[p] < 0:
				first[p] = i
			default:
				of.join(first[p], i)
			}
		}
	}
	return of, first
}
