package provider

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/openfaas/faas-provider/types"

	"github.com/stagecoach-serving/stagecoach/pipeline"
)

// The annotations that answers add to those of a deployment. A deploy ignores them, because they
// may be copied from an answer.
const (
	// StatusAnnotation holds the status of the deployed revision: ready, updating, failing or
	// asleep, then details after a colon, such as why replicas do not start.
	StatusAnnotation = pipeline.Prefix + "status"
	// ReplicasAnnotation lists the replicas, their nodes, and how long each took to start.
	ReplicasAnnotation = pipeline.Prefix + "replicas"
	// GuessAnnotation holds the process that was guessed, and why, if the deployment names none.
	GuessAnnotation = pipeline.Prefix + "guessed-process"
	// FailureAnnotation says when and why a replica last failed, and what this replica printed
	// last: parts that " | " separates.
	FailureAnnotation = pipeline.Prefix + "last-failure"
	// VariantsAnnotation lists the variants that serve the function's stage: parts that " | "
	// separates.
	VariantsAnnotation = pipeline.Prefix + "variants"
	// BatchAnnotation says which batch was chosen for a function that leaves it to its profile, and
	// why.
	BatchAnnotation = pipeline.Prefix + "chosen-batch"
	// AccuracyAnnotation says how accurate a variant, or a stage with variants, is and how that is
	// known.
	AccuracyAnnotation = pipeline.Prefix + "known-accuracy"
)

// ServesNoStage comes in the status of a variant before the reason why it serves no stage.
const ServesNoStage = "it serves no stage: "

// DropAnswered deletes the annotations that answers add.
func DropAnswered(annotations map[string]string) {
	for _, name := range []string{StatusAnnotation, ReplicasAnnotation, GuessAnnotation, FailureAnnotation, VariantsAnnotation, BatchAnnotation, AccuracyAnnotation} {
		delete(annotations, name)
	}
}

// lastLines is how many of the lines that a replica printed before it failed are shown.
const lastLines = 5

func (p *Provider) list(w http.ResponseWriter, r *http.Request) {
	ns, err := p.queried(r)
	if err != nil {
		p.fail(w, r, err)
		return
	}
	out := []types.FunctionStatus{} // an empty list is [], not null
	for _, d := range p.Registry.Functions() {
		if d.Declared.Namespace == ns {
			out = append(out, p.show(d))
		}
	}
	writeJSON(w, http.StatusOK, out)
}

func (p *Provider) describe(w http.ResponseWriter, r *http.Request) {
	d, err := p.find(r.PathValue("name"), "", r)
	if err != nil {
		p.fail(w, r, err)
		return
	}
	out := p.show(&d)
	annotate(&out, ReplicasAnnotation, replicas(p.Status.Replicas(d.Key)))
	annotate(&out, FailureAnnotation, p.lastFailure(r.Context(), d.Key))
	annotate(&out, VariantsAnnotation, variants(p.Registry, p.Status, &d.Declared))
	annotate(&out, BatchAnnotation, p.Status.Batch(d.Key))
	if a := p.Registry.Accuracy.Function(&d); a.Measured != nil || d.Declared.VariantOf != "" || len(p.Registry.Variants(d.Key)) > 0 {
		annotate(&out, AccuracyAnnotation, a.String())
	}
	if usage, _ := strconv.ParseBool(r.URL.Query().Get("usage")); usage {
		if u, ok := p.Status.Usage(d.Key); ok {
			out.Usage = &types.FunctionUsage{CPU: u.CPUMilli, TotalMemoryBytes: u.MemoryBytes}
		}
	}
	writeJSON(w, http.StatusOK, out)
}

// Answer returns a function in the form of the API, without the state of its replicas. The values
// of its secrets are not in it.
func (d *Deployed) Answer() types.FunctionStatus {
	f := &d.Deployment
	return types.FunctionStatus{
		Name: f.Service, Image: f.Image, Namespace: f.Namespace, EnvProcess: f.EnvProcess, EnvVars: f.EnvVars,
		Constraints: f.Constraints, Secrets: f.Secrets, Labels: f.Labels, Annotations: f.Annotations,
		Limits: f.Limits, Requests: f.Requests, ReadOnlyRootFilesystem: f.ReadOnlyRootFilesystem, CreatedAt: d.CreatedAt,
	}
}

// show combines the deployment and the state of its replicas.
func (p *Provider) show(d *Deployed) types.FunctionStatus {
	s, out := p.Status.State(d.Key), d.Answer()
	out.InvocationCount, out.Replicas, out.AvailableReplicas = s.Invocations, uint64(max(s.Replicas, 0)), uint64(max(s.Available, 0))
	// faas-cli prints a table, so the text must be one line.
	status := s.Status
	if fault, bad := p.Registry.VariantFault(d.Declared); bad {
		status += "; " + ServesNoStage + fault.String()
	}
	annotate(&out, StatusAnnotation, oneLine(status))
	annotate(&out, GuessAnnotation, d.guessed())
	return out
}

// variants describes in one line the variants that serve a function's stage; "": it has none.
func variants(r *Registry, status Status, f *pipeline.Function) string {
	if f.VariantOf != "" {
		return "" // a variant of a variant serves no stage
	}
	const most = 50
	all := r.Variants(f.Key())
	var out []string
	for _, key := range all[:min(len(all), most)] {
		d, ok := r.Function(key)
		if !ok {
			continue
		}
		v := variantStatus(r, status, &d.Declared)
		out = append(out, fmt.Sprintf("%s: %d, %d ready, %s", v.Title(), v.Replicas, v.AvailableReplicas, v.Status))
	}
	if more := len(all) - most; more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(out, " | ")
}

// guessed describes in one line which process was guessed, why, and how it runs. It returns "" if
// none was guessed.
func (d *Deployed) guessed() string {
	if d.Guess.Process == "" {
		return ""
	}
	how := "once per request (environment mode: http runs it as a server)"
	switch mode := d.Deployment.EnvVars["mode"]; {
	case mode != "":
		how = "in mode " + mode
	case d.Guess.HTTP:
		how = "as a server (environment mode: streaming runs it once per request)"
	}
	return fmt.Sprintf("fprocess: %s, because %s; runs %s", d.Guess.Process, d.Guess.Why, how)
}

// lastFailure returns when and why a replica of a function last failed, and what it printed last;
// "" if none has failed.
func (p *Provider) lastFailure(ctx context.Context, key pipeline.Key) string {
	f := p.Status.State(key).Failure
	if f.Replica == "" {
		return ""
	}
	parts := []string{fmt.Sprintf("%s %s %s: %s", f.At.UTC().Format(time.RFC3339), f.Replica, f.Kind, f.Cause)}
	reader := p.Logs.Read(LogQuery{Key: key, Replica: f.Replica, Tail: lastLines})
	defer reader.Close()
	for {
		lines, _, err := reader.Read(ctx)
		if err != nil { // the end, or the client is gone
			break
		}
		for _, l := range lines {
			parts = append(parts, l.Text)
		}
	}
	for i, text := range parts {
		parts[i] = oneLine(text)
	}
	return strings.Join(parts, " | ")
}

// replicas describes in one line which replicas run where, and how they were started.
func replicas(all []Replica) string {
	const most = 50
	var out []string
	for _, r := range all[:min(len(all), most)] {
		text := fmt.Sprintf("%s on %s: %s", r.Name, r.Node, r.State)
		if r.Older {
			text += ", of an older revision"
		}
		if r.Hidden {
			text += ", its node is silent"
		}
		if r.Path != "" {
			text += ", " + r.Path
		}
		if r.Ready > 0 {
			text += fmt.Sprintf(", ready after %v", r.Ready.Round(100*time.Microsecond))
		}
		if len(r.Phases) > 0 {
			var phases []string
			for _, p := range r.Phases {
				phases = append(phases, fmt.Sprintf("%s %v", p.Name, p.Took.Round(100*time.Microsecond)))
			}
			text += " (" + strings.Join(phases, ", ") + ")"
		}
		if r.Answered > 0 {
			text += fmt.Sprintf(", first answer after %v", r.Answered.Round(100*time.Microsecond))
		}
		out = append(out, text)
	}
	if more := len(all) - most; more > 0 {
		out = append(out, fmt.Sprintf("and %d more", more))
	}
	return strings.Join(out, "; ")
}

// annotate adds an annotation to an answer, unless text is empty.
func annotate(s *types.FunctionStatus, name, text string) {
	if text == "" {
		return
	}
	with := maps.Clone(deref(s.Annotations)) // the map belongs to the deployment
	if with == nil {
		with = map[string]string{}
	}
	with[name] = text
	s.Annotations = &with
}

// oneLine joins text, such as a program's last words, into one line.
func oneLine(text string) string { return strings.Join(strings.Fields(text), " ") }
