package cluster

import (
	"errors"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// parameters is how much of a node's memory the parameters of a function's revision take. A node
// says it when it has loaded them, or when they did not fit. Without this number, the placer would
// choose a node that refuses the function again and again.
type parameters struct {
	revision uint64
	bytes    int64 // 0: unknown
}

// follow forgets the size when the function has a newer revision.
func (p *parameters) follow(revision uint64) {
	if revision > p.revision {
		*p = parameters{revision: revision}
	}
}

// refused learns the size from the error of a start for which a node's memory was too small.
func (p *parameters) refused(revision uint64, err error) {
	var room interface{ NeedsMemory() int64 }
	if errors.As(err, &room) && revision >= p.revision {
		p.follow(revision)
		p.bytes = max(p.bytes, room.NeedsMemory())
	}
}

// learnParameters takes the sizes of the zygotes in s. A zygote of an older revision counts, too,
// until its node retires it.
func learnParameters(functions map[pipeline.Key]*function, s *plan.Snapshot) {
	for _, n := range s.Nodes {
		for _, z := range n.Zygotes {
			if k := functions[pipeline.ParseKey(z.Function)]; k != nil {
				k.parameters.bytes = max(k.parameters.bytes, z.Bytes)
			}
		}
	}
}
