package join

import (
	"log/slog"
	"slices"
	"sync"

	"github.com/stagecoach-serving/stagecoach/stage/zygote"
	"github.com/stagecoach-serving/stagecoach/tensor"
)

// Model is a loaded model. zygote.Session implements it.
type Model interface {
	Inputs() []zygote.Info
	Outputs() []zygote.Info
	Run(inputs []tensor.Tensor, outputs ...string) ([]tensor.Tensor, error)
}

// Result is what the model returned for one set of inputs.
type Result struct {
	Outputs []tensor.Tensor // if Err is nil
	Err     error
}

// Runner runs a model for several sets of inputs. Several goroutines may use it.
type Runner struct {
	model           Model
	inputs, outputs []zygote.Info
	log             *slog.Logger

	mu             sync.Mutex // of both
	plain, padding verdict
}

// verdict says whether a way of joining has given the results of single runs.
type verdict uint8

const (
	unknown verdict = iota // not tried yet
	equal
	different
)

// New returns a runner of the model. log gets a line if the model turns out not to be joinable.
func New(m Model, log *slog.Logger) *Runner {
	r := &Runner{model: m, inputs: m.Inputs(), outputs: m.Outputs(), log: log}
	fixed := func(info zygote.Info) bool { return !open(info, 0) }
	if len(r.inputs) == 0 || slices.ContainsFunc(r.inputs, fixed) || slices.ContainsFunc(r.outputs, fixed) {
		r.plain, r.padding = different, different
	}
	return r
}

// Run returns one result per set, in order. It reads the data of the sets in place, and outputs of
// several sets may share memory.
func (r *Runner) Run(sets [][]tensor.Tensor) []Result {
	out := make([]Result, len(sets))
	plain, padding := r.verdicts()
	var joinable []set
	for i, inputs := range sets {
		if s, ok := newSet(i, r.inputs, inputs); ok && plain != different && len(sets) > 1 {
			joinable = append(joinable, s)
		} else {
			out[i] = r.alone(inputs)
		}
	}
	for _, g := range groups(joinable, padding != different) {
		r.run(&g, sets, out)
	}
	return out
}

func (r *Runner) verdicts() (plain, padding verdict) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.plain, r.padding
}

func (r *Runner) alone(inputs []tensor.Tensor) (out Result) {
	out.Outputs, out.Err = r.model.Run(inputs)
	return out
}

// run computes a group into out. The results of single runs win where the group is compared.
func (r *Runner) run(g *group, sets [][]tensor.Tensor, out []Result) {
	single := func() (failed bool) {
		for _, s := range g.sets {
			out[s.at] = r.alone(sets[s.at])
			failed = failed || out[s.at].Err != nil
		}
		return failed
	}
	plain, padding := r.verdicts()
	known := plain
	if g.padded {
		known = padding
	}
	if len(g.sets) == 1 || known == different {
		single()
		return
	}
	if known == equal {
		r.bisect(g, sets, out)
		return
	}
	split, err := r.joined(g)
	if single() {
		return // a bad set says nothing about the model
	}
	if err != nil {
		r.judge(g, different, "error", err)
		return
	}
	for i, s := range g.sets {
		if why := difference(split[i], out[s.at].Outputs); why != "" {
			r.judge(g, different, "difference", why)
			return
		}
	}
	r.judge(g, equal)
}

// bisect computes a group into out. If the joined run fails, each half of the group runs on its
// own, and so on. So one bad set among n costs at most 2·log2(n) further runs, rounded up.
func (r *Runner) bisect(g *group, sets [][]tensor.Tensor, out []Result) {
	if len(g.sets) == 1 {
		out[g.sets[0].at] = r.alone(sets[g.sets[0].at])
		return
	}
	if split, err := r.joined(g); err == nil {
		for i, s := range g.sets {
			out[s.at] = Result{Outputs: split[i]}
		}
		return
	}
	half := len(g.sets) / 2
	for _, part := range [][]set{g.sets[:half], g.sets[half:]} {
		r.bisect(newGroup(part), sets, out)
	}
}

// joined runs the model once for a group, and returns the outputs of each set.
func (r *Runner) joined(g *group) ([][]tensor.Tensor, error) {
	outputs, err := r.model.Run(g.inputs(r.inputs))
	if err != nil {
		return nil, err
	}
	return g.outputs(r.outputs, outputs)
}

// judge sets the verdict of the group's way of joining.
func (r *Runner) judge(g *group, v verdict, why ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	of := &r.plain
	if g.padded {
		of = &r.padding
	}
	if *of == different {
		return
	}
	if *of = v; v == different {
		r.log.Warn("this model's calls are not joined from now on: joined runs do not give the results of single runs; set stagecoach.dev/batch to 1, or export the model with a batch axis",
			append([]any{"sets", len(g.sets), "padded", g.padded}, why...)...)
	}
}
