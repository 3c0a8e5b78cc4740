package keysmanager

import (
	"maps"
	"slices"

	"github.com/stagecoach-serving/stagecoach/keysmanager/resources"
	"github.com/stagecoach-serving/stagecoach/keysmanager/zygote"
)

// replicas are the processes of the node's replicas by name, including replicas that are being
// started. The caller of each method holds the store's mutex.
type replicas map[string]*process

// remove frees the name of a process.
func (all replicas) remove(p *process) {
	if all[p.replica] == p {
		delete(all, p.replica)
	}
}

// running returns the process of a replica whose Start has returned, or nil if no such replica
// runs.
func (all replicas) running(name string) *process {
	if p := all[name]; p != nil && p.running {
		return p
	}
	return nil
}

// of returns the sorted names of the replicas that have started from a zygote and run.
func (all replicas) of(z *zygote.Zygote) (names []string) {
	for name, p := range all {
		if p.running && (p.zygote == z || p.mapped == z) { // until it runs, its start may still set them
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// functionsOf returns the functions of a zygote's replicas, including replicas that are being
// started.
func (all replicas) functionsOf(z *zygote.Zygote) (functions []string) {
	for _, p := range all {
		if p.zygote == z || p.mapped == z {
			functions = append(functions, p.function)
		}
	}
	return functions
}

// guests returns the functions of each worker's replicas, by the worker's cgroup.
func (all replicas) guests() map[*resources.Cgroup][]string {
	out := map[*resources.Cgroup][]string{}
	for p := range maps.Values(all) {
		if !p.running || !p.zygote.Works() { // until it runs, its start may still set its zygote
			continue
		}
		if g := p.zygote.Held().Group(); g != nil {
			out[g] = append(out[g], p.function)
		}
	}
	return out
}

// groups returns the cgroups of the replicas that run.
func (all replicas) groups() (out []*resources.Cgroup) {
	for _, p := range all {
		if p.running && p.held.Group() != nil {
			out = append(out, p.held.Group())
		}
	}
	return out
}

// count adds each running replica to the family of its zygote, and returns the replicas that have
// no zygote. byZygote has the index of each zygote's family. Replicas of a worker are left out,
// because the worker's memory includes theirs.
func (all replicas) count(families []resources.Family, byZygote map[*zygote.Zygote]int) (alone resources.Family) {
	for _, p := range all {
		if !p.running || p.zygote.Works() {
			continue
		}
		copied := resources.Copied{PID: p.pid, Bytes: -1}
		if u := p.held.Group().Info(); u != nil {
			copied.Bytes = u.Memory
		}
		of := p.zygote
		if of == nil {
			of = p.mapped
		}
		if i, ok := byZygote[of]; ok && of != nil {
			families[i].Replicas = append(families[i].Replicas, copied)
		} else if of == nil {
			alone.Replicas = append(alone.Replicas, copied)
		}
	}
	return alone
}

// infos describes the replicas that run.
func (all replicas) infos() (out []ReplicaInfo) {
	for _, p := range all {
		if p.running {
			out = append(out, ReplicaInfo{p.replica, p.function, p.pid, p.path, p.device, p.started, p.phases, p.held.Group().Milli(), p.usage(), p.entry})
		}
	}
	return out
}
