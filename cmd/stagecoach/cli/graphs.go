package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"github.com/stagecoach-serving/stagecoach/image/stack"
	"github.com/stagecoach-serving/stagecoach/internal/console"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider"
	"github.com/stagecoach-serving/stagecoach/provider/client"
)

// graphCheck checks the pipelines that a deploy creates or changes, before the deploy sends
// anything. It includes the functions of the stack file that this deploy does not send, because
// they may be deployed later.
type graphCheck struct {
	file   string                             // for messages
	inFile map[pipeline.Key]pipeline.Function // functions of the stack file
	// errors of functions of the stack file with wrong fields
	bad      map[pipeline.Key]error
	selected map[pipeline.Key]bool              // functions that the deploy sends
	deployed map[pipeline.Key]pipeline.Function // functions that are already deployed
}

// checkGraphs returns an error if a pipeline has a fault with the deployed functions and those of
// the stack file. The error has one line per fault, which names the function and its field.
func checkGraphs(ctx context.Context, c *client.Client, f *stack.File, names []string, namespace string) error {
	g := readGraphs(f, names, namespace)
	if err := g.fields(); err != nil {
		return err
	}
	if err := g.list(ctx, c); err != nil {
		return err
	}
	return g.faults()
}

// readGraphs reads what the functions of a stack file declare. A namespace of the command line
// overrides that of a function.
func readGraphs(f *stack.File, names []string, namespace string) *graphCheck {
	g := &graphCheck{
		file: f.Name, inFile: map[pipeline.Key]pipeline.Function{}, bad: map[pipeline.Key]error{},
		selected: map[pipeline.Key]bool{}, deployed: map[pipeline.Key]pipeline.Function{},
	}
	for name, fn := range f.Functions {
		key := pipeline.Key{Name: name, Namespace: cmp.Or(namespace, fn.Namespace, pipeline.DefaultNamespace)}
		parsed, err := pipeline.Parse(name, key.Namespace, fn.Labels, declared(fn.Annotations))
		g.inFile[key] = parsed
		if err != nil {
			g.bad[key] = err
		}
		if slices.Contains(names, name) {
			g.selected[key] = true
		}
	}
	return g
}

// declared returns the annotations without those that the platform adds to its answers.
func declared(annotations map[string]string) map[string]string {
	out := maps.Clone(annotations)
	provider.DropAnswered(out)
	return out
}

// fields returns the errors of single fields. It covers the selected functions, and other functions
// in the same pipelines, because their graphs cannot be checked with wrong fields.
func (g *graphCheck) fields() error {
	touched := map[pipeline.Key]bool{}
	for key := range g.selected {
		for _, p := range g.inFile[key].Pipelines {
			touched[pipeline.Key{Name: p, Namespace: key.Namespace}] = true
		}
	}
	var errs []error
	for _, key := range slices.SortedFunc(maps.Keys(g.bad), pipeline.Key.Compare) {
		together := slices.ContainsFunc(g.inFile[key].Pipelines, func(p string) bool {
			return touched[pipeline.Key{Name: p, Namespace: key.Namespace}]
		})
		if g.selected[key] || together {
			errs = append(errs, g.located(key.Name, g.bad[key])...)
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return errors.Join(append(errs, errors.New("nothing was sent"))...)
}

// located adds to each error of a function's fields where the field is in the stack file.
func (g *graphCheck) located(name string, err error) (out []error) {
	all := []error{err}
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		all = joined.Unwrap()
	}
	for _, err := range all {
		field := (*pipeline.FieldError)(nil)
		switch {
		case !errors.As(err, &field):
			err = fmt.Errorf("%s: functions.%s: %w", g.file, name, err)
		case field.Path == "name":
			err = fmt.Errorf("%s: functions.%s: got the name %s, want %s", g.file, name, field.Got, field.Want)
		default:
			err = fmt.Errorf("%s: functions.%s.%w", g.file, name, err)
		}
		out = append(out, err)
	}
	return out
}

// list requests the deployed functions of the namespaces that have selected functions.
func (g *graphCheck) list(ctx context.Context, c *client.Client) error {
	namespaces := map[string]bool{}
	for key := range g.selected {
		namespaces[key.Namespace] = true
	}
	for _, ns := range slices.Sorted(maps.Keys(namespaces)) {
		var all []struct {
			Name        string            `json:"name"`
			Labels      map[string]string `json:"labels"`
			Annotations map[string]string `json:"annotations"`
		}
		a, err := c.Do(ctx, http.MethodGet, "/system/functions?namespace="+url.QueryEscape(ns), "", nil)
		switch {
		case err != nil:
		case a.Status == http.StatusNotFound: // this deploy creates the namespace
			continue
		default:
			err = a.Decode("GET /system/functions", &all)
		}
		if err != nil {
			return fmt.Errorf("the functions that are deployed in namespace %q: %w", ns, err)
		}
		for _, d := range all {
			key := pipeline.Key{Name: d.Name, Namespace: ns}
			// A function with unreadable fields still counts, because the server has accepted it.
			g.deployed[key], _ = pipeline.ParseStored(d.Name, ns, d.Labels, declared(d.Annotations))
		}
	}
	return nil
}

// faults returns an error with the faults that the deploy would cause, and those of functions in
// the file. It leaves out faults that other functions already have.
func (g *graphCheck) faults() error {
	before := map[pipeline.Key][]pipeline.Fault{}
	with := maps.Clone(g.deployed)
	for _, p := range pipeline.Assemble(slices.Collect(maps.Values(with))) {
		before[p.Key()] = p.Faults
	}
	for key, fn := range g.inFile {
		with[key] = fn
	}
	var errs []error
	for _, p := range pipeline.Assemble(slices.Collect(maps.Values(with))) {
		if !g.concerns(p) {
			continue
		}
		for _, f := range p.Faults {
			if _, ours := g.inFile[pipeline.Key{Name: f.Function, Namespace: p.Namespace}]; ours || !slices.Contains(before[p.Key()], f) {
				errs = append(errs, g.explain(p, f))
			}
		}
	}
	errs = append(errs, g.variantFaults(with)...)
	if len(errs) == 0 {
		return nil
	}
	return errors.Join(append(errs, errors.New(
		"nothing was sent: fix the stack file, deploy functions of other files first, or use --check-graphs=false"))...)
}

// variantFaults returns the faults of the file's variants, given all functions after the deploy. A
// variant whose stage's own function was removed keeps its stage.
func (g *graphCheck) variantFaults(all map[pipeline.Key]pipeline.Function) (errs []error) {
	for _, key := range slices.SortedFunc(maps.Keys(g.inFile), pipeline.Key.Compare) {
		fn := g.inFile[key]
		stage := pipeline.Key{Name: fn.VariantOf, Namespace: key.Namespace}
		near := map[string]pipeline.Function{}
		if of, there := all[stage]; there {
			near[of.Name] = of
		}
		fault, bad := pipeline.VariantFault(fn, near)
		if !bad || !g.selected[key] || fault.Missing != "" && g.deployed[key].VariantOf == fn.VariantOf {
			continue
		}
		if fault.Missing != "" {
			fault.Got, fault.Want = fmt.Sprintf("%q, which is neither in %s nor deployed", fault.Missing, g.file), fmt.Sprintf("a function of namespace %q", key.Namespace)
		}
		errs = append(errs, fmt.Errorf("%s: functions.%s.annotations[%q]: got %s, want %s", g.file, fn.Name, fault.Annotation, fault.Got, fault.Want))
	}
	return errs
}

// concerns reports whether the deploy sends a stage of the pipeline, a function that such a stage
// leads to, or a function with the pipeline's name.
func (g *graphCheck) concerns(p pipeline.Pipeline) bool {
	if g.selected[p.Key()] {
		return true
	}
	return slices.ContainsFunc(p.Stages, func(s pipeline.Stage) bool {
		return g.selected[s.Key()] || slices.ContainsFunc(s.Function.Next, func(e pipeline.Edge) bool {
			return g.selected[pipeline.Key{Name: e.To, Namespace: p.Namespace}]
		})
	})
}

// explain returns an error that says where a fault is: in the stack file or in a deployed function.
func (g *graphCheck) explain(p pipeline.Pipeline, f pipeline.Fault) error {
	got, want := f.Got, f.Want
	if f.Missing != "" {
		got = fmt.Sprintf("%q, which is neither in %s nor deployed", f.Missing, g.file)
		want = fmt.Sprintf("a function of namespace %q", p.Namespace)
	}
	if _, ours := g.inFile[pipeline.Key{Name: f.Function, Namespace: p.Namespace}]; ours {
		return fmt.Errorf("%s: functions.%s.annotations[%q]: got %s, want %s (pipeline %q)", g.file, f.Function, f.Annotation, got, want, p.Key())
	}
	return fmt.Errorf("function %q, which is deployed and not in %s: annotation %s: got %s, want %s, or `stagecoach remove %[1]s` (pipeline %[6]q)",
		f.Function, g.file, f.Annotation, got, want, p.Key())
}

// checkPipelines returns the faults that the pipelines of deployed functions still have, and those
// of deployed variants that serve no stage. It prints the policies that pipelines disagree about,
// which do not keep them from running.
func checkPipelines(ctx context.Context, c *client.Client, all []client.Deployment, out io.Writer) error {
	var errs []error
	stages := map[string]map[string]bool{} // names of functions by namespace
	for _, d := range all {
		if d.Annotations[pipeline.Prefix+"variant-of"] != "" {
			errs = append(errs, checkVariant(ctx, c, pipeline.Named(d.Service, cmp.Or(d.Namespace, pipeline.DefaultNamespace))))
		}
		if strings.TrimSpace(d.Annotations[pipeline.Prefix+"pipeline"]) == "" {
			continue
		}
		ns := cmp.Or(d.Namespace, pipeline.DefaultNamespace)
		if stages[ns] == nil {
			stages[ns] = map[string]bool{}
		}
		stages[ns][d.Service] = true
	}
	for _, ns := range slices.Sorted(maps.Keys(stages)) {
		var pipelines []provider.PipelineStatus
		if err := c.Get(ctx, "/system/pipelines?namespace="+url.QueryEscape(ns), &pipelines); err != nil {
			errs = append(errs, fmt.Errorf("the pipelines of namespace %q: %w", ns, err))
			continue
		}
		for _, p := range pipelines {
			if !slices.ContainsFunc(p.Stages, func(s provider.StageStatus) bool { return stages[ns][s.Name] }) {
				continue
			}
			for _, f := range p.Faults {
				errs = append(errs, fmt.Errorf("pipeline %q cannot run: %s", pipeline.Key{Name: p.Name, Namespace: p.Namespace},
					console.Harmless(pipeline.Fault{Function: f.Function, Annotation: f.Annotation, Got: f.Got, Want: f.Want}.String())))
			}
			for _, f := range p.Warnings {
				if f.Annotation == pipeline.Prefix+"variant-of" { // said above
					continue
				}
				fmt.Fprintf(out, "warning: pipeline %q: %s\n", pipeline.Key{Name: p.Name, Namespace: p.Namespace},
					console.Harmless(pipeline.Fault{Function: f.Function, Annotation: f.Annotation, Got: f.Got, Want: f.Want}.String()))
			}
		}
	}
	return errors.Join(errs...)
}

// checkVariant returns why a deployed variant serves no stage.
func checkVariant(ctx context.Context, c *client.Client, key pipeline.Key) error {
	var f struct {
		Annotations map[string]string `json:"annotations"`
	}
	if err := c.Get(ctx, "/system/function/"+url.PathEscape(key.Name)+"?namespace="+url.QueryEscape(key.Namespace), &f); err != nil {
		return fmt.Errorf("variant %q: %w", key, err)
	}
	if _, why, bad := strings.Cut(f.Annotations[provider.StatusAnnotation], provider.ServesNoStage); bad {
		return fmt.Errorf("variant %q: %s%s", key, provider.ServesNoStage, console.Harmless(why))
	}
	return nil
}
