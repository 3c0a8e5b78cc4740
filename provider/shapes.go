package provider

import "github.com/stagecoach-serving/stagecoach/autoscaler/plan"

// Planned returns what policies know about the function before it is measured. points are its
// measured service times, as [Registry.Points] returns them.
func (d *Deployed) Planned(points []plan.Point) plan.Function {
	f, r := plan.Declared(d.Declared), d.Resources()
	f.Revision, f.Profile = d.Revision, points
	f.Memory, f.CPUMilli, f.CPULimit = r.MemoryRequest, r.CPURequest, r.CPULimit
	return f
}
