package plan

import (
	"fmt"
	"slices"
	"strings"
)

// Resource is a kind of resource that a replica needs on a node.
type Resource string

// The resources that a replica may need.
const (
	Memory       Resource = "memory"
	CPU          Resource = "cpu"
	Devices      Resource = "devices"
	DeviceMemory Resource = "device-memory" // on each device
)

// Lack is a resource that no node has enough of for one replica.
type Lack struct {
	Of   Resource
	Need string // what the replica needs, for example "500.0 GiB of memory"
	Most string // what the nodes have, for example "the largest node, a, has 15.6 GiB"
}

// Lacking returns why no node could hold one replica of f, even if the node were empty and its
// devices had no faults. The result has the resources that no node has enough of. If each resource
// is enough on some node but no node has enough of all, one Lack describes all of them. Lacking
// returns nil if a node could hold the replica, or if there are no nodes. Unknown memory or cores
// count as enough.
func Lacking(nodes []Node, f *Function) []Lack {
	if len(nodes) == 0 {
		return nil
	}
	var lacks []Lack
	all := make([]int, len(nodes)) // per node: number of resources that it has enough of
	need := f.resources()
	for _, r := range need {
		best, enough := &nodes[0], false
		for i := range nodes {
			n := &nodes[i]
			if n.enough(f, r) {
				all[i]++
				enough = true
			}
			if n.size(f, r) > best.size(f, r) {
				best = n
			}
		}
		if !enough {
			of := r
			if r == Devices && slices.ContainsFunc(nodes, func(n Node) bool { return len(n.Devices) >= f.GPU }) {
				of = DeviceMemory
			}
			lacks = append(lacks, Lack{of, f.need(r), fmt.Sprintf("the largest node, %s, has %s", best.Name, best.has(f, r))})
		}
	}
	if len(lacks) > 0 {
		return lacks
	}
	for _, n := range all {
		if n == len(need) {
			return nil
		}
	}
	return []Lack{{need[0], f.needs(need), "no node has all of it: " + offers(nodes, f, need)}}
}

// offersTold is how many nodes a [Lack] lists by name.
const offersTold = 3

// offers describes how much the nodes have of the needed resources.
func offers(nodes []Node, f *Function, need []Resource) string {
	var out []string
	for i := range nodes[:min(len(nodes), offersTold)] {
		var has []string
		for _, r := range need {
			has = append(has, nodes[i].has(f, r))
		}
		out = append(out, nodes[i].Name+" has "+strings.Join(has, ", "))
	}
	if more := len(nodes) - offersTold; more > 0 {
		out = append(out, fmt.Sprintf("and %d more nodes", more))
	}
	return strings.Join(out, "; ")
}

// resources returns the resources that a replica of f needs.
func (f *Function) resources() (all []Resource) {
	if f.Memory > 0 {
		all = append(all, Memory)
	}
	if f.CPUMilli > 0 {
		all = append(all, CPU)
	}
	if f.GPU > 0 {
		all = append(all, Devices)
	}
	return all
}

// need describes how much of a resource a replica of f needs.
func (f *Function) need(r Resource) string {
	switch {
	case r == Memory:
		return Size(f.Memory) + " of memory"
	case r == CPU:
		return fmt.Sprintf("%dm of a processor", f.CPUMilli)
	case f.DeviceMemory > 0:
		return fmt.Sprintf("%d devices with %s each", f.GPU, Size(f.DeviceMemory))
	}
	return fmt.Sprintf("%d devices", f.GPU)
}

func (f *Function) needs(all []Resource) string {
	var out []string
	for _, r := range all {
		out = append(out, f.need(r))
	}
	return strings.Join(out, " and ")
}

// size returns how much of a resource n has in total that a replica of f can use. The unit is
// bytes, thousandths of a core, or devices.
func (n *Node) size(f *Function, r Resource) int64 {
	switch r {
	case Memory:
		return n.Memory
	case CPU:
		return int64(n.CPUMilli)
	}
	count := int64(0)
	for _, d := range n.Devices {
		if DeviceNeed(f.DeviceMemory, d.Memory) <= d.Memory {
			count++
		}
	}
	return count
}

// has describes how much of a resource n has, as size counts it.
func (n *Node) has(f *Function, r Resource) string {
	switch size := n.size(f, r); {
	case r == Memory:
		return Size(size)
	case r == CPU:
		return fmt.Sprintf("%dm", size)
	case size > 0:
		return fmt.Sprintf("%d of them", size)
	case len(n.Devices) == 0:
		return "no devices"
	}
	largest := int64(0)
	for _, d := range n.Devices {
		largest = max(largest, d.Memory)
	}
	return "devices with at most " + Size(largest)
}

// enough reports whether n has enough of a resource for one replica of f. An unknown amount is
// enough.
func (n *Node) enough(f *Function, r Resource) bool {
	switch r {
	case Memory:
		return n.Memory == 0 || f.Memory <= n.Memory
	case CPU:
		return n.CPUMilli == 0 || f.CPUMilli <= n.CPUMilli
	}
	return n.size(f, Devices) >= int64(f.GPU)
}
