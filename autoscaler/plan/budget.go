package plan

import (
	"cmp"
	"slices"
)

// Budget is what the replicas of a domain may use together, existing ones included. The sharer
// gives it to a [Mixer] before the Mixer decides. A Mixer gives each function the fewest replicas
// that it may have, even if they exceed the budget.
type Budget struct {
	Replicas int
	CPUMilli int   // thousandths of a core, for CPU requests
	Memory   int64 // bytes
	// Devices are sorted by Memory. A Snapshot knows no other kind of device than its size.
	Devices []DevicePool
	// Most bounds the functions for which the placer found room for fewer replicas lately than the
	// Mixer wanted, sorted by Function.
	Most []Most
}

// DevicePool is all devices of one size.
type DevicePool struct {
	Memory int64 // of each device, in bytes
	Free   int64 // bytes of all of them together
}

// Most is the largest number of replicas of a function that can be placed.
type Most struct {
	Function string
	Count    int
}

// AtMost returns the largest number of replicas that the function may have: see [Budget.Most] and
// [Function.Bounds].
func (b *Budget) AtMost(f *Function) int {
	least, most := f.Bounds()
	if i, ok := slices.BinarySearchFunc(b.Most, f.Name, func(m Most, name string) int { return cmp.Compare(m.Function, name) }); ok {
		most = min(most, max(b.Most[i].Count, least))
	}
	return most
}

// Exceeded returns the resource of which these functions use more than b has, or "" if there is
// none. counts has the number of replicas of each function.
func (b *Budget) Exceeded(functions []*Function, counts []int) string {
	replicas, cpu, memory := 0, 0, int64(0)
	var on []*Function // those with devices
	var replicasOn []int
	for i, f := range functions {
		n := counts[i]
		replicas += n
		cpu += n * max(f.CPUMilli, 0)
		memory += int64(n) * max(f.Memory, 0)
		if f.GPU > 0 && n > 0 {
			on, replicasOn = append(on, f), append(replicasOn, n*f.GPU)
		}
	}
	switch {
	case replicas > b.Replicas:
		return "replicas"
	case cpu > b.CPUMilli && cpu > 0:
		return "CPU"
	case memory > b.Memory && memory > 0:
		return "memory"
	case len(on) > 0 && !b.devices(on, replicasOn):
		return "device memory"
	}
	return ""
}

// devices reports whether b's devices have room for n[i] devices' worth of each function. Functions
// that take part of a device come first, the largest parts before the smaller ones, because whole
// devices may have any size. Each takes the smallest size with room.
func (b *Budget) devices(functions []*Function, n []int) bool {
	order := make([]int, len(functions))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(x, y int) int {
		return cmp.Compare(functions[y].DeviceMemory, functions[x].DeviceMemory)
	})
	free := slices.Clone(b.Devices)
	for _, i := range order {
		left := int64(n[i])
		for k := range free {
			need := max(functions[i].DeviceMemory, 0)
			if need == 0 {
				need = free[k].Memory
			}
			if need > free[k].Memory || need <= 0 {
				continue
			}
			// As many per device as fit, because a part cannot be on two.
			take := min(left, free[k].Free/need)
			free[k].Free, left = free[k].Free-take*need, left-take
		}
		if left > 0 {
			return false
		}
	}
	return true
}
