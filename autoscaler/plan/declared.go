package plan

import "github.com/stagecoach-serving/stagecoach/pipeline"

// Declared returns a function of a Snapshot as it was declared, before it is measured. Revision,
// Memory, CPUMilli, CPULimit and Profile are not declared in f; the caller sets them.
func Declared(f pipeline.Function) Function {
	out := Function{
		Name: f.Key().String(), Min: f.Scale.Min, Max: f.Scale.Max, Zero: f.Scale.Zero, ZeroAge: f.Scale.ZeroAge,
		GPU: f.GPU, DeviceMemory: f.GPUMemory, Batch: f.Batch, Variant: Variant{Accuracy: f.Accuracy, MaxLength: f.MaxLength, BatchWait: f.BatchWait},
	}
	if f.AutoBatch {
		out.Batch, out.AutoBatch = 1, f.MostBatch()
	}
	if f.VariantOf != "" {
		out.VariantOf = f.Stage().String()
	} else if len(f.Pipelines) == 0 {
		out.Chosen = Chosen(f.Policies)
		if f.AutoBatch {
			out.Objective = f.SLO
		}
	}
	if f.Scale.Type != "" {
		out.Target = Target{Type: f.Scale.Type, Value: float64(f.Scale.Target) * f.Scale.Proportion}
	}
	return out
}
