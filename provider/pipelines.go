package provider

import (
	"fmt"
	"net/http"
	"runtime"
	"slices"
	"strings"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/pipeline"
	"github.com/stagecoach-serving/stagecoach/provider/accuracy"
)

// PipelineStatus is a pipeline in GET /system/pipelines.
type PipelineStatus struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
	// The graph has no faults, so it can be invoked.
	Ready bool   `json:"ready"`
	Entry string `json:"entry"`         // name of the first stage; empty: none yet
	SLO   string `json:"slo,omitempty"` // a Go duration
	// In topological order; sorted by name if there are faults.
	Stages []StageStatus   `json:"stages"`
	Faults []PipelineFault `json:"faults"`
	// How accurate the answers of its chains are; empty: no stage has variants, there are several
	// last stages, or too many chains.
	Chains []accuracy.Chain `json:"chains,omitempty"`
	// Variants that are meant for its stages but serve none, and policies that another pipeline asks
	// for differently. They do not keep it from running.
	Warnings []PipelineFault `json:"warnings,omitempty"`
}

// StageStatus is a stage of a [PipelineStatus].
type StageStatus struct {
	Name              string      `json:"name"`
	Next              []StageEdge `json:"next"`
	Each              bool        `json:"each,omitempty"`
	Replicas          int         `json:"replicas"`
	AvailableReplicas int         `json:"availableReplicas"`
	Status            string      `json:"status,omitempty"` // as in [StatusAnnotation]
	// The stage's own function was removed, so only its variants serve it.
	Retained bool            `json:"retained,omitempty"`
	Variants []VariantStatus `json:"variants,omitempty"` // sorted by name
}

// VariantStatus is a variant of a stage.
type VariantStatus struct {
	Name              string  `json:"name"`
	Accuracy          float64 `json:"accuracy,omitempty"`
	AccuracyFrom      string  `json:"accuracyFrom,omitempty"` // annotation, measured or default
	MaxLength         int     `json:"maxLength,omitempty"`    // 0: any
	Replicas          int     `json:"replicas"`
	AvailableReplicas int     `json:"availableReplicas"`
	Status            string  `json:"status,omitempty"` // as in [StatusAnnotation]
}

// Title returns the variant's name with what it declares.
func (v VariantStatus) Title() string {
	var declares []string
	if v.Accuracy > 0 {
		text := fmt.Sprintf("accuracy %.4g", v.Accuracy)
		if v.AccuracyFrom == accuracy.FromMeasured {
			text += " measured"
		}
		declares = append(declares, text)
	}
	if v.MaxLength > 0 {
		declares = append(declares, fmt.Sprintf("max-length %d", v.MaxLength))
	}
	if len(declares) == 0 {
		return v.Name
	}
	return v.Name + " (" + strings.Join(declares, ", ") + ")"
}

// StageEdge leads to a successor.
type StageEdge struct {
	To string `json:"to"`
	If string `json:"if,omitempty"`
}

// PipelineFault is a fault in a pipeline's graph.
type PipelineFault struct {
	Function   string `json:"function,omitempty"` // empty: the pipeline as a whole
	Annotation string `json:"annotation,omitempty"`
	Got        string `json:"got"`
	Want       string `json:"want"`
}

func (p *Provider) listPipelines(w http.ResponseWriter, r *http.Request) {
	ns, err := p.queried(r)
	if err != nil {
		p.fail(w, r, err)
		return
	}
	out := []PipelineStatus{}
	for _, pl := range p.Registry.Pipelines() {
		if pl.Namespace == ns {
			out = append(out, p.showPipeline(pl))
		}
	}
	writeJSON(w, http.StatusOK, out)
}

// describePipeline shows one pipeline, even if a function has the same name.
func (p *Provider) describePipeline(w http.ResponseWriter, r *http.Request) {
	key := pipeline.Named(r.PathValue("name"), r.URL.Query().Get("namespace"))
	all := p.Registry.Pipelines()
	i := slices.IndexFunc(all, func(pl pipeline.Pipeline) bool { return pl.Key() == key })
	if i < 0 {
		p.fail(w, r, p.Registry.NotFound("pipeline", key))
		return
	}
	writeJSON(w, http.StatusOK, p.showPipeline(all[i]))
}

func (p *Provider) showPipeline(pl pipeline.Pipeline) PipelineStatus {
	out := PipelineStatus{
		Name: pl.Name, Namespace: pl.Namespace, Ready: len(pl.Faults) == 0, Entry: pl.Entry,
		Stages: []StageStatus{}, Faults: []PipelineFault{},
	}
	if pl.SLO > 0 {
		out.SLO = pl.SLO.String()
	}
	for _, st := range pl.Stages {
		s := p.Status.State(st.Key())
		stage := StageStatus{
			Name: st.Name, Next: []StageEdge{}, Each: st.Each, Replicas: s.Replicas, AvailableReplicas: s.Available, Status: oneLine(s.Status),
			Retained: st.Retained,
		}
		for _, v := range st.Variants {
			stage.Variants = append(stage.Variants, variantStatus(p.Registry, p.Status, &v))
		}
		for _, e := range st.Next {
			stage.Next = append(stage.Next, StageEdge(e))
		}
		out.Stages = append(out.Stages, stage)
	}
	if chains := p.Registry.Accuracy.Pipeline(&pl).Chains; len(chains) > 1 || len(chains) == 1 && chains[0].Measured != nil {
		out.Chains = chains
	}
	for _, f := range pl.Faults {
		out.Faults = append(out.Faults, PipelineFault{f.Function, f.Annotation, f.Got, f.Want})
	}
	for _, f := range slices.Concat(pl.Warnings, pipeline.Disagreements(pl, p.Registry.Pipelines())) {
		out.Warnings = append(out.Warnings, PipelineFault{f.Function, f.Annotation, f.Got, f.Want})
	}
	return out
}

// variantStatus returns the state of a variant.
func variantStatus(r *Registry, status Status, v *pipeline.Function) VariantStatus {
	s := status.State(v.Key())
	out := VariantStatus{Name: v.Name, Accuracy: v.Accuracy, MaxLength: v.MaxLength, Replicas: s.Replicas, AvailableReplicas: s.Available, Status: oneLine(s.Status)}
	if d, ok := r.Function(v.Key()); ok {
		a := r.Accuracy.Function(&d)
		out.Accuracy, out.AccuracyFrom = a.Accuracy, a.From
	}
	return out
}

// missing returns a text with one line per fault. The faults keep the function's pipelines from
// running, or a variant from serving its stage, or a policy from being followed. Such faults are
// normal, because functions may be deployed in any order.
func missing(r *Registry, f pipeline.Function) (text string) {
	const most = 20 // faults per pipeline
	if fault, bad := r.VariantFault(f); bad {
		return "\nit serves no stage so far: " + fault.String()
	}
	for _, name := range f.Pipelines {
		pl, there := r.Pipeline(pipeline.Key{Name: name, Namespace: f.Namespace})
		if there {
			for _, fault := range pipeline.Disagreements(pl, r.Pipelines()) {
				text += fmt.Sprintf("\npipeline %q: %s", pl.Key(), fault)
			}
		}
		if !there || len(pl.Faults) == 0 {
			continue
		}
		text += fmt.Sprintf("\npipeline %q cannot run so far:", pl.Key())
		for _, fault := range pl.Faults[:min(len(pl.Faults), most)] {
			text += "\n  " + fault.String()
		}
		if more := len(pl.Faults) - most; more > 0 {
			text += fmt.Sprintf("\n  and %d more faults", more)
		}
	}
	return text
}

// gatewayInfo is the answer of OpenFaaS's gateway to GET /system/info, which faas-cli reads.
type gatewayInfo struct {
	Arch     string             `json:"arch"`
	Provider types.ProviderInfo `json:"provider"`
	Version  types.VersionInfo  `json:"version"`
}

// info answers clients as a gateway, and answers a gateway in front of Stagecoach as a provider.
// Such a gateway forwards its clients' requests and wraps the answer.
func (p *Provider) info(w http.ResponseWriter, r *http.Request) {
	version := types.VersionInfo{Release: p.Version, SHA: p.Version}
	provider := types.ProviderInfo{Name: "stagecoach", Orchestration: "stagecoach", Version: &version}
	if r.Header.Get("X-Forwarded-Host") != "" {
		writeJSON(w, http.StatusOK, provider)
		return
	}
	writeJSON(w, http.StatusOK, gatewayInfo{Arch: runtime.GOARCH, Provider: provider, Version: version})
}
