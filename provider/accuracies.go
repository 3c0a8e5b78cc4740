package provider

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/stagecoach-serving/stagecoach/autoscaler/plan"
	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/accuracy"
)

// Prefixes of keys in the store: of the accuracy of functions, and of the chains of pipelines.
const (
	accuracyPrefix = "accuracy/"
	chainsPrefix   = "chains/"
)

// Accuracies are the measured accuracies that the registry follows. All methods may be called at
// any time.
type Accuracies struct {
	registry  *Registry
	functions sync.Map // pipeline.Key to *accuracy.Results, with one result of a function
	chains    sync.Map // pipeline.Key of a pipeline to *accuracy.Results
}

// apply follows a stored record. It returns false if the key is none of these records.
func (a *Accuracies) apply(e Entry) bool {
	all, name := &a.functions, ""
	name, ok := strings.CutPrefix(e.Key, accuracyPrefix)
	if !ok {
		if name, ok = strings.CutPrefix(e.Key, chainsPrefix); !ok {
			return false
		}
		all = &a.chains
	}
	key := pipeline.ParseKey(name)
	if e.Deleted {
		all.Delete(key)
		return true
	}
	var r accuracy.Results
	err := json.Unmarshal(e.Value, &r)
	if err == nil {
		err = r.Validate()
	}
	if err != nil {
		a.registry.log.Warn("a stored accuracy is left out", "of", key, "error", err)
		r = accuracy.Results{} // an entry, so that it is removed with its function
	}
	all.Store(key, &r)
	return true
}

// Function returns what is known about the accuracy of a deployed function.
func (a *Accuracies) Function(d *Deployed) accuracy.Function {
	f := accuracy.Function{
		Stage: d.Declared.Name, Function: d.Declared.Name, Image: imageOf(d), Accuracy: 1, From: accuracy.FromDefault,
	}
	if d.Declared.VariantOf != "" {
		f.Stage = d.Declared.VariantOf
	}
	if v, ok := a.functions.Load(d.Key); ok && len(v.(*accuracy.Results).Functions) == 1 {
		r := v.(*accuracy.Results)
		m := r.Functions[0].Measured
		f.Measured, f.Stale = &m, !r.Images[f.Function].Same(f.Image)
		f.Accuracy, f.From = m.Mean, accuracy.FromMeasured
	}
	if annotations := d.Deployment.Annotations; annotations != nil {
		if _, states := (*annotations)[pipeline.Prefix+"accuracy"]; states {
			f.Accuracy, f.From = d.Declared.Accuracy, accuracy.FromAnnotation
		}
	}
	return f
}

func imageOf(d *Deployed) accuracy.Image {
	return accuracy.Image{Image: d.Deployment.Image, Digest: d.Digest}
}

// stage returns the functions that serve a stage.
func (a *Accuracies) stage(st *pipeline.Stage) (out []accuracy.Function) {
	for _, f := range slices.Concat([]pipeline.Function{st.Function}, st.Variants) {
		if d, ok := a.registry.Function(f.Key()); ok {
			out = append(out, a.Function(&d))
		}
	}
	return out
}

// Pipeline returns what is known about the functions and chains of a pipeline. Only a pipeline
// without faults and with one last stage has chains.
func (a *Accuracies) Pipeline(p *pipeline.Pipeline) accuracy.Sheet {
	out := accuracy.Sheet{Name: p.Key().String(), Functions: []accuracy.Function{}}
	var stages [][]accuracy.Function
	for i := range p.Stages {
		st := &p.Stages[i]
		all := a.stage(st)
		stages = append(stages, all)
		out.Stages, out.Functions = append(out.Stages, st.Name), append(out.Functions, all...)
		if len(st.Next) == 0 {
			out.Ends++
		}
	}
	if len(p.Faults) > 0 || out.Ends != 1 {
		return out
	}
	measured := &accuracy.Results{}
	if v, ok := a.chains.Load(p.Key()); ok {
		measured = v.(*accuracy.Results)
	}
	images := map[string]accuracy.Image{}
	for _, f := range out.Functions {
		images[f.Function] = f.Image
	}
	out.Chains = accuracy.Chains(stages, func(functions []string) *accuracy.Measured {
		for i := range measured.Chains {
			c := &measured.Chains[i]
			if slices.Equal(c.Functions, functions) && !slices.ContainsFunc(functions, func(f string) bool { return !measured.Images[f].Same(images[f]) }) {
				return &c.Measured
			}
		}
		return nil
	})
	return out
}

// Fill sets the accuracy of chains in a snapshot: those of pipelines of which a chain was measured.
func (a *Accuracies) Fill(s *plan.Snapshot) {
	for i := range s.Pipelines {
		key := pipeline.ParseKey(s.Pipelines[i].Name)
		if _, some := a.chains.Load(key); !some {
			continue
		}
		p, ok := a.registry.Pipeline(key)
		if !ok {
			continue
		}
		chains := a.Pipeline(&p).Chains
		if !slices.ContainsFunc(chains, func(c accuracy.Chain) bool { return c.Measured != nil }) {
			continue
		}
		for _, c := range chains {
			of := plan.ChainAccuracy{Accuracy: c.Accuracy, Measured: c.Measured != nil}
			for _, f := range c.Functions {
				of.Functions = append(of.Functions, pipeline.Key{Name: f, Namespace: p.Namespace}.String())
			}
			s.Pipelines[i].Accuracies = append(s.Pipelines[i].Accuracies, of)
		}
	}
}

// accuracyAPI serves /system/accuracy/NAME. NAME is a pipeline or a function.
type accuracyAPI struct{ *Provider }

// sheet returns what is known about what a request names.
func (p accuracyAPI) sheet(r *http.Request) (accuracy.Sheet, pipeline.Key, error) {
	key := pipeline.Named(r.PathValue("name"), r.URL.Query().Get("namespace"))
	if g, ok := p.Registry.Pipeline(key); ok {
		return p.Registry.Accuracy.Pipeline(&g), key, nil
	}
	d, ok := p.Registry.Function(key)
	if !ok && !p.Registry.Retained(key) {
		return accuracy.Sheet{}, key, p.Registry.NotFound("pipeline or function", key)
	}
	out := accuracy.Sheet{Name: key.String(), Ends: 1, Functions: []accuracy.Function{}}
	if ok {
		out.Functions = append(out.Functions, p.Registry.Accuracy.Function(&d))
	}
	for _, v := range p.Registry.Variants(key) {
		if d, ok := p.Registry.Function(v); ok {
			out.Functions = append(out.Functions, p.Registry.Accuracy.Function(&d))
		}
	}
	return out, key, nil
}

func (p accuracyAPI) show(w http.ResponseWriter, r *http.Request) {
	out, _, err := p.sheet(r)
	if err != nil {
		p.fail(w, r, err)
		return
	}
	writeJSON(w, http.StatusOK, out)
}

func (p accuracyAPI) store(w http.ResponseWriter, r *http.Request) {
	var got accuracy.Results
	err := readJSON(w, r, &got)
	if err == nil {
		err = got.Validate()
	}
	if err == nil {
		err = p.changing(r.Context(), func(ctx context.Context) error { return p.put(ctx, r, got) })
	}
	if err != nil {
		p.fail(w, r, err)
		return
	}
	writeText(w, http.StatusAccepted, "accuracy of "+r.PathValue("name"))
}

// put stores results. Chains replace all earlier chains of the pipeline.
func (p accuracyAPI) put(ctx context.Context, r *http.Request, got accuracy.Results) error {
	sheet, key, err := p.sheet(r)
	if err != nil {
		return err
	}
	for _, f := range sheet.Functions {
		if was, ok := got.Images[f.Function]; ok && !was.Same(f.Image) {
			return refuse(http.StatusConflict, fmt.Errorf("function %q has the image %s %s now, and %s %s was measured; measure it again",
				f.Function, quote(f.Image.Image), quote(f.Digest), quote(was.Image), quote(was.Digest)))
		}
	}
	for i := range got.Functions {
		if name := got.Functions[i].Functions[0]; !slices.ContainsFunc(sheet.Functions, func(f accuracy.Function) bool { return f.Function == name }) {
			return &pipeline.FieldError{Path: fmt.Sprintf("functions[%d].functions", i), Got: quote(name), Want: fmt.Sprintf("a function that serves %q", sheet.Name)}
		}
	}
	for i := range got.Chains {
		c := &got.Chains[i]
		if !slices.ContainsFunc(sheet.Chains, func(of accuracy.Chain) bool { return slices.Equal(of.Functions, c.Functions) }) {
			return &pipeline.FieldError{Path: fmt.Sprintf("chains[%d].functions", i), Got: quote(strings.Join(c.Functions, ",")), Want: fmt.Sprintf("a chain of pipeline %q", sheet.Name)}
		}
	}
	return p.putAll(ctx, key, got)
}

func (p accuracyAPI) putAll(ctx context.Context, key pipeline.Key, got accuracy.Results) error {
	put := func(key string, r accuracy.Results) error {
		r.Version = accuracy.Version
		value, err := json.Marshal(r)
		if err != nil {
			return fmt.Errorf("accuracy: %w", err)
		}
		rev, err := p.Store.Put(ctx, key, value)
		if err != nil {
			return fmt.Errorf("accuracy: %w", err)
		}
		return p.Registry.wait(ctx, rev)
	}
	for _, all := range [][]accuracy.Result{got.Functions, got.Chains} {
		for i := range all {
			if all[i].At.IsZero() {
				all[i].At = time.Now().UTC()
			}
		}
	}
	for _, f := range got.Functions {
		of := pipeline.Key{Name: f.Functions[0], Namespace: key.Namespace}
		r := accuracy.Results{Images: map[string]accuracy.Image{of.Name: got.Images[of.Name]}, Functions: []accuracy.Result{f}}
		if err := put(accuracyPrefix+of.String(), r); err != nil {
			return err
		}
	}
	if len(got.Chains) > 0 {
		if err := put(chainsPrefix+key.String(), accuracy.Results{Images: got.Images, Chains: got.Chains}); err != nil {
			return err
		}
	}
	p.Log.Info("accuracy stored", "of", key, "functions", len(got.Functions), "chains", len(got.Chains))
	return nil
}

// dropAccuracy deletes what was measured of a function that is about to be removed. The chains of
// its pipelines go, too, unless it is a variant.
func dropAccuracy(ctx context.Context, s Store, r *Registry, d *Deployed) error {
	var keys []string
	if _, ok := r.Accuracy.functions.Load(d.Key); ok {
		keys = append(keys, accuracyPrefix+d.Key.String())
	}
	for _, name := range d.Declared.Pipelines {
		key := pipeline.Key{Name: name, Namespace: d.Declared.Namespace}
		if _, ok := r.Accuracy.chains.Load(key); ok && d.Declared.VariantOf == "" {
			keys = append(keys, chainsPrefix+key.String())
		}
	}
	for _, key := range keys {
		if err := s.Delete(ctx, key); err != nil {
			return fmt.Errorf("accuracy of %q: %w", d.Key, err)
		}
	}
	return nil
}
